"""Who may join a batch, who takes part in a step, and how much prompt is computed beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from headwater.config import KvConfig
from headwater.costs import PassCosts
from headwater.kv.sizing import plan_layout
from headwater.model.spec import ModelSpec
from headwater.services.decode.pace import Pace
from headwater.services.decode.sequence import Sequence
from headwater.services.decode.step_model import RoutedExperts, StepBytes, StepModel
from headwater.weights.loader import load_weights

if TYPE_CHECKING:
    from collections.abc import Sequence as Listing
    from pathlib import Path

# 100 dense bytes and one layer of 8 experts of 100 bytes, of which a token uses 2.
BYTES = StepBytes(100, (RoutedExperts(8, 2, 800),), kv_bytes_per_token=0)
UNKNOWN: Any = None


def steps(seconds_per_byte: float = 0.001, seconds_per_token: float = 0.0) -> StepModel:
    """A model that has seen steps of one and of four tokens at that speed."""
    model = StepModel(BYTES)
    for count in (1, 4, 1, 4):
        num_bytes = BYTES.expected(count, 0)
        model.observe(count, 0, seconds_per_byte * num_bytes + seconds_per_token * count)
    return model


def sequences(*wishes: float | None) -> list[Sequence]:
    """One sequence per wish; the first was served last."""
    return [
        Sequence(
            f"r{i}", UNKNOWN, [1, 2], 2, 9, UNKNOWN, print, tpot_seconds=wish, last_token_at=-i
        )
        for i, wish in enumerate(wishes)
    ]


def test_expected_bytes_grow_with_different_experts() -> None:
    assert BYTES.expected(1, 0) == 100 + 200
    assert BYTES.expected(2, 0) == pytest.approx(100 + 800 * (1 - 0.75**2))
    assert BYTES.expected(1000, 0) == pytest.approx(900)
    assert StepBytes(100, (), 3).expected(7, 5) == 115


def test_bytes_of_a_checkpoint(tiny_model: Path, shm_prefix: str) -> None:
    """Dense weights and experts are all there is, but for the embedding, which is looked up."""
    spec = ModelSpec.load(tiny_model)
    store = load_weights(tiny_model, spec.tensors(), shm_prefix=shm_prefix)
    layout = plan_layout(spec, KvConfig(pool_tokens=64))
    step = StepBytes.of_model(spec, store.entries.values(), layout)
    store.close()
    # 4 experts of 3 matrices of 96 x 64 in BF16, 2 of which a token uses, in 2 layers.
    assert [(e.num_experts, e.experts_per_token, e.num_bytes) for e in step.experts] == [
        (4, 2, 4 * 3 * 96 * 64 * 2)
    ] * 2
    total = sum(entry.num_bytes for entry in store.entries.values())
    embedding = 258 * 64 * 2
    assert step.dense_bytes == total - sum(e.num_bytes for e in step.experts) - embedding
    # 2 layers of a key and a value for 2 heads of 16, in BF16.
    assert step.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_step_times_are_learnt() -> None:
    model = steps(0.001, 0.01)
    assert model.seconds(1, 0) == pytest.approx(0.31)
    assert model.seconds(3, 0) == pytest.approx(0.001 * BYTES.expected(3, 0) + 0.03)
    assert StepModel(BYTES).seconds(3, 0) == 0.0


@pytest.mark.parametrize(
    ("running", "candidate", "admitted"),
    [
        # A step of one takes 0.3 s, of two 0.45 s, of three 0.56 s, of four 0.65 s.
        ((), 0.001, True),
        ((None, None, None), None, True),
        ((0.5,), 0.5, True),
        ((0.6, 0.6), 0.6, True),
        # Hardly in reach: a step may still take twice what it takes for one.
        ((0.35, 0.35), 0.35, True),
        ((0.35, 0.35, 0.35), 0.35, False),
        # Out of reach even for one.
        ((0.1,) * 9, 0.1, True),
        # The strictest wish counts ...
        ((9.0, 9.0, 9.0, 0.6, 0.6, 0.6), 0.6, False),
        # ... and who wishes for little takes part in few of its steps.
        ((60.0,) * 9, 0.6, True),
        ((0.6, 0.6, 0.6), 60.0, True),
        # Who has no wish takes part in all.
        ((0.6, 0.6, None), None, False),
    ],
)
def test_admission(running: Listing[float | None], candidate: float | None, admitted: bool) -> None:
    *before, new = sequences(*running, candidate)
    assert Pace(steps(), extend_tokens=8).admits(before, new) is admitted


def test_nothing_is_refused_before_anything_is_known() -> None:
    *before, new = sequences(0.001, 0.001, 0.001)
    pace = Pace(StepModel(BYTES), extend_tokens=8)
    assert pace.admits(before, new)
    assert pace.members([*before, new]) == [*before, new]
    assert pace.extend_budget(before, PassCosts(1.0, 1.0, 5, 8)) == 8


def test_whose_token_is_due_first_goes_first() -> None:
    everybody = sequences(9.0, 9.0, 9.0, 9.0, 0.6, 9.0)
    pace = Pace(steps(), extend_tokens=8)
    # Three fit into 0.6 s: the strict one and the two that have waited longest.
    assert pace.members(everybody) == [everybody[4], everybody[5], everybody[3]]
    few = everybody[3:5]
    assert pace.members(few) == few


def test_everybody_gets_on_when_not_all_fit() -> None:
    everybody = sequences(*[0.6] * 7)
    pace, served, now = Pace(steps(), extend_tokens=8), [0] * 7, 0.0
    for _ in range(70):
        now += 0.6
        for sequence in pace.members(everybody):
            served[everybody.index(sequence)] += 1
            now += 0.001
            sequence.last_token_at = now
    assert max(served) - min(served) <= 1


@pytest.mark.parametrize(
    ("running", "limit"),
    [((), 16), ((None,), 16), ((0.6,), 3), ((0.7, 9.0), 4), ((0.3001,), 3), ((0.01,), 16)],
)
def test_batch_limit(running: Listing[float | None], limit: int) -> None:
    assert Pace(steps(), extend_tokens=8).batch_limit(sequences(*running), 16) == limit


def stalls(pace: Pace, wish: float | None, costs: PassCosts, num_steps: int) -> list[float]:
    """Seconds of each pass over prompt tokens beside a stream that wishes for so much."""
    found = []
    for _ in range(num_steps):
        count = pace.extend_budget(sequences(wish), costs)
        found.append(costs.seconds(count))
    return found


def test_a_prompt_stalls_a_stream_no_more_than_its_wish_allows() -> None:
    """A step takes 0.3 s; 64 prompt tokens would take 0.69 s."""
    costs = PassCosts(0.05, 0.01, 5, 64)
    for wish, most in ((0.6, 0.3), (0.8, 0.5), (1.2, 0.69)):
        passes = stalls(Pace(steps(), extend_tokens=64), wish, costs, 100)
        assert max(passes) <= most + 0.01
        assert sum(passes) / 100 <= wish - 0.3 + 0.01
        assert min(passes) > 0.0


def test_passes_that_a_wish_cannot_pay_at_once_are_saved_up_for() -> None:
    """A pass costs 1 s whatever its size; the stream leaves 0.3 s per step."""
    costs = PassCosts(1.0, 0.001, 5, 64)
    passes = stalls(Pace(steps(), extend_tokens=64), 0.6, costs, 100)
    assert 20 <= sum(p > 0.0 for p in passes) <= 30
    assert sum(passes) / 100 <= 0.3 + 0.01
    # Even where the wish leaves nothing, prompts get on.
    hopeless = stalls(Pace(steps(), extend_tokens=64), 0.001, costs, 200)
    assert sum(p > 0.0 for p in hopeless) >= 2


def test_nobody_decoding_means_nobody_stalls() -> None:
    pace = Pace(steps(), extend_tokens=64)
    assert pace.extend_budget([], PassCosts(1.0, 1.0, 5, 64)) == 64
    assert pace.extend_budget(sequences(None), PassCosts(1.0, 1.0, 5, 64)) == 64
    assert math.isinf(pace.limit_seconds(sequences(None)))
