"""How fast the threads of this process read memory: the limit that decoding is held against."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwater import _native

if TYPE_CHECKING:
    from headwater.kernels import WorkerPool
    from headwater.weights.store import WeightsStore

_ROUNDS = 3
_MAX_BYTES = 1 << 30
_CPU0_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_rate(pool: WorkerPool, address: int, num_bytes: int) -> float:
    """Bytes per second of reading `num_bytes` at `address` with all threads: the best of three."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began_at = time.perf_counter()
        _native.read_memory(pool.native, address, num_bytes)
        best = min(best, time.perf_counter() - began_at)
    return num_bytes / best


def weights_read_rate(pool: WorkerPool, weights: WeightsStore) -> float:
    """The same of the weights as they lie, at most a GiB of them.

    Zero when they would fit in the last-level cache twice over, for then it says nothing of memory.
    """
    num_bytes = min(weights.segment.payload_bytes, _MAX_BYTES)
    if num_bytes < 2 * last_level_cache_bytes():
        return 0.0
    view = torch.frombuffer(weights.segment.view(0, num_bytes), dtype=torch.uint8)
    return read_rate(pool, view.data_ptr(), num_bytes)


def last_level_cache_bytes(caches: Path = _CPU0_CACHES) -> int:
    """Of one CPU's largest cache; zero where the kernel does not tell."""
    sizes = [path.read_text(encoding="ascii").strip() for path in caches.glob("index*/size")]
    return max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes), default=0)
