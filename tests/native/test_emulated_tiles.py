"""The kernels for AMX, on any machine with AVX-512: with tiles and FP16 arithmetic in software."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from headwater.kernels import supported_isas

NATIVE = Path(__file__).resolve().parents[2] / "native"
# What is looked at, and what it needs besides.
CHECKED = ("src/amx/kernels.cpp", "tests/tiles_check.cpp")
NEEDED = (
    "src/avx512/kernels.cpp",
    "src/avx512/attention.cpp",
    "src/avx512/float_product.cpp",
    "src/avx2/kernels.cpp",
    "src/avx2/attention.cpp",
    "src/avx2/float_product.cpp",
    "src/scalar/kernels.cpp",
    "src/scalar/attention.cpp",
    "src/scalar/float_product.cpp",
    "src/cpu.cpp",
    "src/matrix.cpp",
    "src/float_self_test.cpp",
    "src/self_test.cpp",
    "src/two_pieces.cpp",
)
FEATURES = (
    "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vbmi avx512bf16 amx-tile amx-bf16 gfni"
)
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]


@pytest.mark.skipif(
    not {"avx512", "amx"} & set(supported_isas()),
    reason="tiles are filled by AVX-512 instructions, which this CPU lacks",
)
def test_amx_kernels_on_emulated_tiles(tmp_path: Path) -> None:
    common = ["c++", "-std=c++20", "-O1", "-ffp-contract=off", "-Wno-attributes"]
    common += [f"-m{feature}" for feature in FEATURES.split()]
    common += [f"-I{NATIVE / folder}" for folder in ("include", "src", "tests")]
    emulation = [
        f"-include{NATIVE / 'tests' / header}"
        for header in ("emulated_tiles.hpp", "emulated_fp16.hpp")
    ]
    compilers, objects = [], []
    for source in (*CHECKED, *NEEDED):
        extra = [*SANITIZERS, *emulation] if source in CHECKED else []
        objects.append(str(tmp_path / (source.replace("/", "_") + ".o")))
        command = [*common, *extra, "-c", str(NATIVE / source), "-o", objects[-1]]
        compilers.append(subprocess.Popen(command))
        if len(compilers) % 2 == 0:
            assert [compiler.wait(timeout=300) for compiler in compilers[-2:]] == [0, 0]
    program = str(tmp_path / "tiles_check")
    subprocess.run(["c++", *SANITIZERS, *objects, "-o", program], check=True, timeout=300)
    seed = random.randrange(1 << 31)
    print("seed", seed)
    subprocess.run([program, str(seed)], check=True, timeout=300)
