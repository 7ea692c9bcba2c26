"""Who runs next: continuous batching, first come first served, up to a batch size."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.services.decode.sequence import Sequence


class Scheduler:
    """Used from the engine's thread only."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def next_batch(self) -> list[Sequence]:
        """Admits what there is room for; returns all that run in this step."""
        while self.waiting and len(self.running) < self._max_batch:
            self.running.append(self.waiting.popleft())
        return list(self.running)

    def finish(self, sequence: Sequence) -> None:
        """Takes out a sequence that ended."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def cancelled(self) -> list[Sequence]:
        """Sequences whose caller has gone."""
        return [s for s in (*self.running, *self.waiting) if s.is_cancelled]
