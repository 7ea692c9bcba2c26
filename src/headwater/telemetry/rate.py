"""Rates over the last ten seconds, for status replies and metrics.

What happens within a tenth of a second is kept as one: a process that sends thousands of tokens per
second must not remember each of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 10.0
_BUCKET_SECONDS = 0.1


@dataclass(slots=True)
class _Bucket:
    began_at: float
    amount: float = 0.0
    seconds: float = 0.0


class _Window:
    """Amounts, and the time spent on them, of the last ten seconds; for use under a lock."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()

    def add(self, amount: float, seconds: float = 0.0) -> None:
        now = time.monotonic()
        self._forget(now)
        if not self._buckets or now - self._buckets[-1].began_at >= _BUCKET_SECONDS:
            self._buckets.append(_Bucket(now))
        self._buckets[-1].amount += amount
        self._buckets[-1].seconds += seconds

    def sums(self) -> tuple[float, float]:
        """Amount and seconds."""
        self._forget(time.monotonic())
        amounts = sum(bucket.amount for bucket in self._buckets)
        return amounts, sum(bucket.seconds for bucket in self._buckets)

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0].began_at < now - WINDOW_SECONDS:
            self._buckets.popleft()


class RateMeter:
    """Counts events; engines count in their own threads and status replies read in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window = _Window()
        self.total = 0

    def add(self, count: int) -> None:
        """Counts events that happened now."""
        with self._lock:
            self.total += count
            self._window.add(count)

    def per_second(self) -> float:
        """The rate over the window."""
        with self._lock:
            return self._window.sums()[0] / WINDOW_SECONDS


class BusyRate:
    """An amount against the time in which it was worked on, over the last ten seconds of the clock.

    One thread adds, any may read. `total`, `busy_seconds` and `num_pieces` count from the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window = _Window()
        self._reached = 0.0
        self.total = 0.0
        self.busy_seconds = 0.0
        self.num_pieces = 0

    def add(self, amount: float, seconds: float) -> None:
        """Counts a piece of work that ended now and took `seconds`."""
        with self._lock:
            self.total += amount
            self.busy_seconds += seconds
            self.num_pieces += 1
            self._window.add(amount, seconds)

    def reached(self, total: float, seconds: float) -> None:
        """The same for who counts himself and has `total` now; less than before: he began anew."""
        amount = total - self._reached if total >= self._reached else total
        self._reached = total
        self.add(amount, seconds)

    def per_second(self) -> float:
        """The rate while there was work; zero when there was none."""
        with self._lock:
            amount, seconds = self._window.sums()
            return amount / seconds if seconds else 0.0
