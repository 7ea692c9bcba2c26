"""What a run means: latencies, throughput, and how many requests met their objectives.

TTFT is from sending a request to its first token; ITL is the gap before each further token; TPOT is
the mean ITL of a request; all in seconds.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.bench.serve.run import Outcome, Run


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a good answer is; None: anything, in seconds."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """Whether a request ended well and in time; one that was refused did not."""
        if outcome.error is not None:
            return False
        return _within(ttft(outcome), self.ttft_seconds) and _within(
            tpot(outcome), self.tpot_seconds
        )


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in seconds; zeros when there is nothing to distribute."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(v) for v in np.percentile(np.asarray(values), (50, 90, 99)))
        return cls(statistics.fmean(values), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """One load, measured. Rates are per second of the run; `attainment` is in [0, 1]."""

    load: str
    seconds: float
    num_requests: int
    num_completed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    output_tokens_per_second: float
    requests_per_second: float
    attainment: float
    goodput_per_second: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def ttft(outcome: Outcome) -> float | None:
    """Seconds to the first token; None when there is none."""
    return outcome.token_times[0] - outcome.sent_at if outcome.token_times else None


def tpot(outcome: Outcome) -> float | None:
    """Seconds per token after the first; None when there is no second one."""
    times = outcome.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def gaps(outcome: Outcome) -> list[float]:
    """The time before each token but the first, in seconds."""
    return [after - before for before, after in itertools.pairwise(outcome.token_times)]


def summarise(load: str, run: Run, objectives: Objectives) -> Summary:
    """Condenses a run; latencies are those of completed requests."""
    completed = [outcome for outcome in run.outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)
    num_good = sum(objectives.are_met(outcome) for outcome in run.outcomes)
    output_tokens = sum(len(outcome.token_times) for outcome in run.outcomes)
    firsts = [value for outcome in completed if (value := ttft(outcome)) is not None]
    paces = [value for outcome in completed if (value := tpot(outcome)) is not None]
    return Summary(
        load=load,
        seconds=run.seconds,
        num_requests=len(run.outcomes),
        num_completed=len(completed),
        errors=dict(errors),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in completed),
        cached_tokens=sum(outcome.cached_tokens for outcome in completed),
        output_tokens=output_tokens,
        ttft=Spread.of(firsts),
        tpot=Spread.of(paces),
        itl=Spread.of([gap for outcome in completed for gap in gaps(outcome)]),
        output_tokens_per_second=output_tokens / run.seconds,
        requests_per_second=len(completed) / run.seconds,
        attainment=num_good / max(1, len(run.outcomes)),
        goodput_per_second=num_good / run.seconds,
    )


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation of repeats: standard deviation over mean; 0 for a single value."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if len(values) > 1 and mean else 0.0
