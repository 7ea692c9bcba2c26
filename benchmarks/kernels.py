"""How close do the expert kernels come to the machine's read bandwidth, and what does AMX bring?

`python benchmarks/kernels.py [--threads N] [--json FILE]`. Each instruction set has a process
of its own; the self-test and the read of memory come first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from record import write_result

from headwater.kernels import supported_isas

if TYPE_CHECKING:
    from collections.abc import Iterator

DECODE_BATCHES = (1, 4, 8, 32)
PREFILL_BATCHES = (128, 512)


def rows_of(isa: str, threads: int) -> list[dict[str, Any]]:
    """All figures of one instruction set, from a child process."""
    command = [sys.executable, __file__, "--child", "--threads", str(threads)]
    environ = os.environ | {"HEADWATER_FORCE_ISA": isa}
    rows: list[dict[str, Any]] = []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            rows.append(json.loads(line))
            show(rows[-1])
    if child.returncode:
        rows.append({"what": "failed", "isa": isa, "status": child.returncode})
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """One line per row, as it comes."""
    cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
    print(" ".join(cells), flush=True)


def measure(threads: int) -> Iterator[dict[str, Any]]:
    """All figures of the instruction set in use, the most wanted ones first."""
    from headwater.bench.kernels import bench_kernel
    from headwater.bench.moe import bench_moe
    from headwater.bench.weights import FORMATS
    from headwater.kernels import isa, self_test

    self_test()
    for batch in DECODE_BATCHES:
        yield bench_moe("deepseek-v3", "fp8", batch, threads)
    if isa() in ("avx512", "amx"):
        for batch in PREFILL_BATCHES:
            yield bench_moe("deepseek-v3", "fp8", batch, threads)
    for fmt in FORMATS:
        yield bench_kernel(fmt, 1)
    for fmt in FORMATS[:1] + FORMATS[2:]:
        for batch in (1, 8):
            yield bench_moe("deepseek-v3", fmt, batch, threads)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
parser.add_argument("--isa", nargs="+", default=[i for i in supported_isas() if i != "scalar"])
parser.add_argument("--json")
parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
arguments = parser.parse_args()
if arguments.child:
    for figures in measure(arguments.threads):
        print(json.dumps(figures), flush=True)
else:
    write_result(
        arguments.json, [row for isa in arguments.isa for row in rows_of(isa, arguments.threads)]
    )
