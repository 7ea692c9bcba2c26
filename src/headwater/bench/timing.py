"""How things are timed here: turn by turn with a read of memory, and medians of both.

The machines that people have are shared and noisy: a figure means something only beside what the
memory gave in the same seconds.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headwater import _native
from headwater.kernels import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Larger than the last-level caches of common servers, so that reads come from DRAM.
READ_BYTES = 1 << 30


@contextmanager
def worker_pool(threads: int) -> Iterator[WorkerPool]:
    """A pool with the calling thread pinned beside it, which is free again afterwards.

    Otherwise the next pool would find a single CPU to share.
    """
    allowed = os.sched_getaffinity(0)
    pool = WorkerPool(threads)
    pool.pin_caller()
    try:
        yield pool
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians: seconds of one run, and GB/s of reading memory just before and after."""

    seconds: float
    read_gb_per_s: float


class ReadProbe:
    """Reads a buffer of its own, in huge pages if there are any, with all threads of a pool."""

    def __init__(self, pool: WorkerPool, num_bytes: int = READ_BYTES) -> None:
        self._pool = pool
        self._buffer = huge_buffer(num_bytes)

    def gb_per_s(self) -> float:
        """One read of the whole buffer."""
        started = time.perf_counter()
        _native.read_memory(self._pool.native, self._buffer.data_ptr(), self._buffer.numel())
        return self._buffer.numel() / (time.perf_counter() - started) / 1e9


def huge_buffer(num_bytes: int) -> torch.Tensor:
    """UINT8 [num_bytes] of private memory, written once."""
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.from_numpy(np.frombuffer(region, dtype=np.uint8))
    buffer.fill_(1)
    return buffer


def stolen_seconds() -> float:
    """Since the start, of all CPUs: what a hypervisor gave to other machines instead.

    Zero where there is none; in steps of 10 ms ("steal" in proc_stat(5)).
    """
    with Path("/proc/stat").open(encoding="ascii") as file:
        _, *times = file.readline().split()
    return int(times[7]) / os.sysconf("SC_CLK_TCK")


def alternate(
    run: Callable[[], None],
    probe: ReadProbe,
    *,
    rounds: int = 9,
    warm_ups: int = 2,
    at_once: int = 1,
) -> Timed:
    """Times `at_once` runs, one after the other, and the probe in turn.

    A run that is much shorter than the probe's should be timed several at once, as layers follow
    each other in a model: the threads' start then weighs as little as it does in the probe.
    """
    for _ in range(warm_ups):
        run()
        probe.gb_per_s()
    seconds, reads = [], []
    for _ in range(rounds):
        reads.append(probe.gb_per_s())
        started = time.perf_counter()
        for _ in range(at_once):
            run()
        seconds.append((time.perf_counter() - started) / at_once)
    return Timed(statistics.median(seconds), statistics.median(reads))
