"""Whether a step runs as one batch or as two micro-batches that take turns, by measured times.

Two micro-batches keep GPU and CPU busy at once, but read experts that they share twice. Which wins
depends on machine, model, batch and context; public attempts with fixed rules lost half of their
speed. So both ways are tried for each kind of step, and the faster one is kept.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from headwater.gpu.hybrid_decoder import MicroBatch

# Steps of either way before the first decision, fewer where one is so many times as slow, and how
# often the slower one gets another chance.
_TRIALS, _LEAST_TRIALS, _CLEAR = 3, 2, 1.2
_RETRY_STEPS = 500
_KEPT = 9


@dataclass(slots=True)
class _Times:
    """Seconds of the latest steps of one kind, merged and dual."""

    merged: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    dual: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_steps: int = 0


class DualBatchPolicy:
    """Decides per number of rows and bound on the context."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], _Times] = {}

    def is_dual(self, num_rows: int, bound: int) -> bool:
        """How the next step of this kind is to run; a single row is never split."""
        if num_rows < 2:
            return False
        times = self._times.setdefault((num_rows, bound), _Times())
        ways = (False, times.merged), (True, times.dual)
        wanted = _LEAST_TRIALS
        if all(len(found) >= _LEAST_TRIALS for _, found in ways):
            merged, dual = (statistics.median(found) for _, found in ways)
            wanted = _LEAST_TRIALS if max(merged, dual) > _CLEAR * min(merged, dual) else _TRIALS
        for is_dual, found in ways:
            if len(found) < wanted:
                return is_dual
        is_faster = statistics.median(times.dual) < statistics.median(times.merged)
        is_retry = times.num_steps % _RETRY_STEPS == 0
        return is_faster != is_retry

    def observe(self, num_rows: int, bound: int, seconds: float, *, is_dual: bool) -> None:
        """Notes what a step took."""
        times = self._times.setdefault((num_rows, bound), _Times())
        (times.dual if is_dual else times.merged).append(seconds)
        times.num_steps += 1

    @property
    def speedups(self) -> dict[tuple[int, int], float]:
        """Merged over dual time, for each kind of step of which both are known."""
        return {
            key: statistics.median(times.merged) / statistics.median(times.dual)
            for key, times in self._times.items()
            if times.merged and times.dual
        }


def micro_batches(num_rows: int, *, is_dual: bool) -> list[MicroBatch]:
    """All rows on the first lane, or half of them on each."""
    if not is_dual:
        return [MicroBatch(0, 0, num_rows)]
    half = (num_rows + 1) // 2
    return [MicroBatch(0, 0, half), MicroBatch(1, half, num_rows - half)]
