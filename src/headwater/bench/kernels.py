"""One weight matrix that stays in the second-level cache: what the instructions can do."""

from __future__ import annotations

from typing import Any

import torch

from headwater import _native
from headwater.bench.timing import READ_BYTES, ReadProbe, alternate, worker_pool
from headwater.bench.weights import Format, random_matrix
from headwater.kernels import Mode, WorkerPool, isa

ROWS, COLUMNS = 64, 7168
# The same matrix so often in one call, whose checks in Python take as long as the product itself.
PARTS = 100


def bench_kernel(fmt: Format, batch: int) -> dict[str, Any]:
    """One row of figures, on one thread."""
    with worker_pool(1) as pool:
        return _measure(pool, fmt, batch)


def _measure(pool: WorkerPool, fmt: Format, batch: int) -> dict[str, Any]:
    matrix = random_matrix((), ROWS, COLUMNS, fmt)
    x, out = torch.randn(batch, COLUMNS), torch.empty(batch, ROWS)
    parts = [(matrix.native, out.data_ptr())] * PARTS

    def run() -> None:
        _native.linear(pool.native, "", parts, x.data_ptr(), batch, Mode.DECODE)

    # The probe leaves nothing of the matrix in the cache, so that its first pass must weigh little.
    num_bytes = matrix.native.stored_bytes
    timed = alternate(run, ReadProbe(pool), at_once=round(READ_BYTES / (PARTS * num_bytes)))
    seconds = timed.seconds / PARTS
    gb_per_s = num_bytes / seconds / 1e9
    return {
        "what": "kernel, cached",
        "shape": f"{ROWS}x{COLUMNS}",
        "format": fmt,
        "batch": batch,
        "threads": 1,
        "isa": isa(),
        "us": seconds * 1e6,
        "gb_per_s": gb_per_s,
        "read_gb_per_s": timed.read_gb_per_s,
        "ratio": gb_per_s / timed.read_gb_per_s,
        "tflop_per_s": 2.0 * batch * ROWS * COLUMNS / seconds / 1e12,
        "tokens_per_s": batch / seconds,
    }
