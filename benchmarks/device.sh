#!/usr/bin/env bash
# Builds the native extension on a machine without network (CMake, pybind11, torch) into src/, and
# runs what is given: `benchmarks/device.sh python benchmarks/kernels.py --json $OUT/kernels.json`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${TMPDIR:-/tmp}/headwater-device-build
cmake -S native -B "$build" -DCMAKE_BUILD_TYPE=Release -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" \
  -DPython_EXECUTABLE="$(command -v python3)" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
cmake --build "$build" --target _native -j "$(nproc)" >>"$build.log" 2>&1 || { tail -40 "$build.log"; exit 1; }
cp "$build"/_native*.so src/headwater/
export PYTHONPATH=src:benchmarks
exec "$@"
