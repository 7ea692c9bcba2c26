"""Events per second over the last ten seconds, for status replies."""

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
