"""Rests between copies, so that others get their share of host memory.

Owns how long: as long as the copy before took, times what its share leaves to others. What a copy
takes is measured on the queue itself, seldom, as that costs time; the host never waits for it.
"""

from __future__ import annotations

from typing import Any

import torch

_NANO = 1e9
# What the newest measurement counts for.
_NEWEST = 0.25
# Copies from one measurement to the next.
_EVERY = 512


class Pacer:
    """Rests on a CUDA `stream` of copies."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._timed_bytes = 0
        self._until_next = 0
        self.seconds_per_byte = 0.0

    def before(self) -> None:
        """A copy is queued next; to be called with the stream current."""
        self._until_next -= 1
        if self._until_next < 0 and not self._timed_bytes:
            self._until_next = _EVERY
            self._events[0].record(self._stream)

    def after(self, num_bytes: int, share: float) -> None:
        """So many bytes have been queued; a rest comes behind if `share`, in (0, 1], is below 1."""
        if self._until_next == _EVERY:
            self._events[1].record(self._stream)
            self._timed_bytes = num_bytes
        elif self._timed_bytes and self._events[1].query():
            taken = self._events[0].elapsed_time(self._events[1]) / 1e3 / self._timed_bytes
            known = self.seconds_per_byte or taken
            self.seconds_per_byte = known + _NEWEST * (taken - known)
            self._timed_bytes = 0
        if share < 1.0 and self.seconds_per_byte:
            rest(num_bytes * self.seconds_per_byte * (1 / share - 1))


def rest(seconds: float) -> None:
    """Keeps the current stream idle for so long; one warp of the device looks at its clock."""
    from headwater.gpu.kernels.rest import rest_kernel

    rest_kernel[(1,)](int(seconds * _NANO), num_warps=1)
