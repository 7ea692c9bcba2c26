"""Rates over the last ten seconds, for status replies and metrics."""

from __future__ import annotations

import threading
import time
from collections import deque

WINDOW_SECONDS = 10.0


class RateMeter:
    """Counts events; engines count in their own threads and status replies read in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, count: int) -> None:
        """Counts events that happened now."""
        now = time.monotonic()
        with self._lock:
            self.total += count
            self._counts.append((now, count))
            self._forget(now)

    def per_second(self) -> float:
        """The rate over the window."""
        with self._lock:
            self._forget(time.monotonic())
            return sum(count for _, count in self._counts) / WINDOW_SECONDS

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] < now - WINDOW_SECONDS:
            self._counts.popleft()


class BusyRate:
    """An amount against the time in which it was worked on, over the last ten seconds of the clock.

    One thread adds, any may read. `total`, `busy_seconds` and `num_pieces` count from the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: deque[tuple[float, float, float]] = deque()
        self._reached = 0.0
        self.total = 0.0
        self.busy_seconds = 0.0
        self.num_pieces = 0

    def add(self, amount: float, seconds: float) -> None:
        """Counts a piece of work that ended now and took `seconds`."""
        now = time.monotonic()
        with self._lock:
            self.total += amount
            self.busy_seconds += seconds
            self.num_pieces += 1
            self._pieces.append((now, amount, seconds))
            self._forget(now)

    def reached(self, total: float, seconds: float) -> None:
        """The same for who counts himself and has `total` now; less than before: he began anew."""
        amount = total - self._reached if total >= self._reached else total
        self._reached = total
        self.add(amount, seconds)

    def per_second(self) -> float:
        """The rate while there was work; zero when there was none."""
        with self._lock:
            self._forget(time.monotonic())
            seconds = sum(piece[2] for piece in self._pieces)
            return sum(piece[1] for piece in self._pieces) / seconds if seconds else 0.0

    def _forget(self, now: float) -> None:
        while self._pieces and self._pieces[0][0] < now - WINDOW_SECONDS:
            self._pieces.popleft()
