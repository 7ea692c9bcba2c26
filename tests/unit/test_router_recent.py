"""What the router tells of the latest answers."""

from __future__ import annotations

from headwater.generation import Timings, Usage
from headwater.services.router.recent import MAX_ANSWERS, Percentiles, RecentAnswers


def test_percentiles_by_nearest_rank() -> None:
    assert Percentiles.of([]) == Percentiles(0.0, 0.0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0)
    assert Percentiles.of([float(n) for n in range(100, 0, -1)]) == Percentiles(50.0, 95.0)


def test_answers_of_the_last_minute() -> None:
    now = 1000.0
    recent = RecentAnswers(clock=lambda: now)
    recent.add(Usage(5, 1), Timings(queue_seconds=0.5, time_to_first_token_seconds=2.0))
    assert (recent.ttft.p50, recent.queue.p50) == (2.0, 0.5)
    # An answer of one token has no time per token.
    assert recent.tpot == Percentiles()
    now += 40.0
    recent.add(Usage(5, 11), Timings(decode_seconds=1.0, time_to_first_token_seconds=4.0))
    assert len(recent) == 2
    assert (recent.ttft.p50, recent.ttft.p95, recent.tpot.p50) == (2.0, 4.0, 0.1)
    now += 40.0
    assert len(recent) == 1
    assert recent.ttft.p50 == 4.0
    for _ in range(2 * MAX_ANSWERS):
        recent.add(Usage(1, 1), Timings())
    assert len(recent) == MAX_ANSWERS
