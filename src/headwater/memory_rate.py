"""How fast the threads of this process read memory: the limit that decoding is held against."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwater import _native

if TYPE_CHECKING:
    from headwater.kernels import WorkerPool
    from headwater.weights.store import WeightsStore

_ROUNDS = 3
# What is read must not fit in the caches, or it tells of them.
_CACHES_FULL = 4
_LEAST_BYTES = 256 << 20
_MOST_BYTES = 4 << 30
_CPUS = Path("/sys/devices/system/cpu")
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
    """The same of the weights as they lie, or of a part of them that tells of memory.

    Zero when they would fit in the last-level caches twice over.
    """
    caches = last_level_cache_bytes(os.sched_getaffinity(0))
    num_bytes = min(weights.segment.payload_bytes, telling_bytes(caches))
    if num_bytes < 2 * caches:
        return 0.0
    view = torch.frombuffer(weights.segment.view(0, num_bytes), dtype=torch.uint8)
    return read_rate(pool, view.data_ptr(), num_bytes)


def telling_bytes(cache_bytes: int) -> int:
    """So much must be read for a rate that tells of memory, by CPUs with such caches."""
    return min(max(_LEAST_BYTES, _CACHES_FULL * cache_bytes), _MOST_BYTES)


def last_level_cache_bytes(cpus: Iterable[int], root: Path = _CPUS) -> int:
    """Of all last-level caches of `cpus` together; zero where the kernel does not tell."""
    found: dict[str, int] = {}
    for cpu in cpus:
        caches = [
            (int(_text(index / "level") or 0), _text(index / "shared_cpu_list"), index)
            for index in root.glob(f"cpu{cpu}/cache/index*")
        ]
        if caches:
            _, sharers, index = max(caches)
            size = _text(index / "size")
            found[sharers] = int(size[:-1]) * _UNITS[size[-1]]
    return sum(found.values())


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
