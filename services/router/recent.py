"""What the latest answers took, for status replies."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.telemetry.metrics import seconds_per_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headwater.generation import Timings, Usage

WINDOW_SECONDS = 60.0
MAX_ANSWERS = 512


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds; zero when there is no value."""

    p50: float = 0.0
    p95: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """By nearest rank: the smallest value that so large a share does not exceed."""
        if not values:
            return cls()
        ordered = sorted(values)
        return cls(*(ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 95)))


@dataclass(frozen=True, slots=True)
class _Answer:
    ended_at: float
    ttft: float
    queue: float
    tpot: float | None


class RecentAnswers:
    """Answers of the last minute, at most the latest 512. Lives in the router's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: deque[_Answer] = deque(maxlen=MAX_ANSWERS)

    def add(self, usage: Usage, timings: Timings) -> None:
        """Notes an answer that ended well."""
        self._answers.append(
            _Answer(
                self._clock(),
                timings.time_to_first_token_seconds,
                timings.queue_seconds,
                seconds_per_token(usage, timings),
            )
        )

    def __len__(self) -> int:
        self._forget()
        return len(self._answers)

    @property
    def ttft(self) -> Percentiles:
        """Times to the first token."""
        self._forget()
        return Percentiles.of([answer.ttft for answer in self._answers])

    @property
    def tpot(self) -> Percentiles:
        """Times per token after the first."""
        self._forget()
        return Percentiles.of([a.tpot for a in self._answers if a.tpot is not None])

    @property
    def queue(self) -> Percentiles:
        """Times from arrival to a place."""
        self._forget()
        return Percentiles.of([answer.queue for answer in self._answers])

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._answers and self._answers[0].ended_at < oldest:
            self._answers.popleft()
