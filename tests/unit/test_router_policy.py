"""Where a prompt is computed, when its first token is due, and who is refused: pure functions."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from headwater.costs import CostMeter, PassCosts
from headwater.services.router.outlook import Correction, Outlook
from headwater.services.router.policy import (
    DecodeLoad,
    PrefillLoad,
    PromptPath,
    Queue,
    choose_path,
    extend_seconds,
    limit_seconds,
    prefill_seconds,
    queue_seconds,
)

# A sweep over the weights takes prefill 1 s, and decode 0.2 s for a small piece of a prompt.
PREFILL = PassCosts(1.0, 0.001, 9, 2000)
EXTEND = PassCosts(0.2, 0.01, 9, 100)
UNKNOWN = PassCosts(max_tokens_per_pass=100)


@pytest.mark.parametrize(
    ("pending", "tokens", "seconds"),
    [
        (0, 10, 1.01),
        (0, 2000, 3.0),
        (0, 2001, 4.001),
        # A short one waits for the pass under way and shares the next.
        (100, 10, 0.5 + 1.11),
        (2000, 10, 0.5 + 4.01),
        (100_000, 10, 0.5 + 2 * 1.0 + 3.010),
        # A long one waits for all.
        (100_000, 2000, 0.5 + 51 * 1.0 + 102.0),
    ],
)
def test_prefill(pending: int, tokens: int, seconds: float) -> None:
    assert prefill_seconds(PrefillLoad(PREFILL, pending), tokens) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("load", "tokens", "seconds"),
    [
        ({}, 10, 0.3),
        ({}, 100, 1.2),
        ({"pending_tokens": 50}, 10, 0.8),
        # A stream without a wish gets its step between passes.
        ({"num_streams": 1, "step_seconds": 0.1}, 100, 1.3),
        # A wish that leaves 0.4 s of each 0.5 s for prompts: 20 tokens at a time.
        ({"num_streams": 1, "step_seconds": 0.1, "tpot_seconds": 0.5}, 100, 2.0 * 0.5 / 0.4),
        # Out of reach: steps may take twice as long, which is half of the time, 16 at a time.
        ({"num_streams": 4, "step_seconds": 0.1, "tpot_seconds": 0.01}, 32, 0.72 * 0.2 / 0.1),
    ],
)
def test_extend(load: dict[str, Any], tokens: int, seconds: float) -> None:
    decode = DecodeLoad(extend_costs=EXTEND, **load)
    assert extend_seconds(decode, tokens) == pytest.approx(seconds)


BUSY: dict[str, Any] = {"num_streams": 2, "step_seconds": 0.05, "tpot_seconds": 0.05}


@pytest.mark.parametrize(
    ("prefill", "extend", "load", "tokens", "path"),
    [
        # Idle: the pass over all weights does not pay for a short prompt.
        (PREFILL, EXTEND, {}, 20, "extend"),
        (PREFILL, EXTEND, {}, 100, "prefill"),
        (PREFILL, EXTEND, {}, 50_000, "prefill"),
        # Strict streams leave little time.
        (PREFILL, EXTEND, BUSY, 16, "extend"),
        (PREFILL, EXTEND, BUSY, 50, "prefill"),
        # The same two engines cost the same: nobody is stalled.
        (EXTEND, EXTEND, {}, 50, "prefill"),
        # Nothing known of prefill, or of decode.
        (UNKNOWN, EXTEND, {}, 20, "prefill"),
        (PREFILL, UNKNOWN, {}, 100, "extend"),
        (PREFILL, UNKNOWN, {}, 101, "prefill"),
    ],
)
def test_path(
    prefill: PassCosts, extend: PassCosts, load: dict[str, Any], tokens: int, path: str
) -> None:
    prefill_load, decode_load = PrefillLoad(prefill), DecodeLoad(extend_costs=extend, **load)
    expected = {
        PromptPath.PREFILL: prefill_seconds(prefill_load, tokens),
        PromptPath.EXTEND: extend_seconds(decode_load, tokens),
    }
    assert choose_path(expected, tokens, prefill_load, decode_load) is PromptPath(path)


# DeepSeek-V3 on a machine as in examples/machines/h200.toml: what sweeps took there
# (benchmarks/results/slp.json), and decode on 16 cores by `headwater plan`, in pieces of 64.
SWEEPS = {4096: 12.25, 8192: 12.62, 16384: 12.65, 32768: 13.18}
EXTEND_ON_CPU = PassCosts(0.2, 0.0175, 9, 64)
STRICT: dict[str, Any] = {"num_streams": 2, "step_seconds": 0.19, "tpot_seconds": 0.25}


@pytest.mark.parametrize(
    ("pending", "load", "tokens", "path"),
    [
        # A sweep takes 12 s however short the prompt; the CPU computes some 590 tokens in that.
        (0, {}, 64, "extend"),
        (0, {}, 500, "extend"),
        (0, {}, 700, "prefill"),
        (0, {}, 16384, "prefill"),
        # A sweep is under way, and the prompt has to wait for the next one.
        (20_000, {}, 700, "extend"),
        (20_000, {}, 900, "extend"),
        (20_000, {}, 1000, "prefill"),
        # Running answers with strict wishes leave the CPU half of its time.
        (0, STRICT, 64, "extend"),
        (0, STRICT, 500, "prefill"),
    ],
)
def test_crossover_of_a_gpu_through_which_weights_stream(
    pending: int, load: dict[str, Any], tokens: int, path: str
) -> None:
    """By the costs that its passes report, whatever computes them."""
    meter = CostMeter(65536)
    for count, seconds in SWEEPS.items():
        meter.observe(count, seconds)
    assert meter.costs.seconds_per_pass == pytest.approx(12.2, abs=0.2)
    prefill, decode = (
        PrefillLoad(meter.costs, pending),
        DecodeLoad(extend_costs=EXTEND_ON_CPU, **load),
    )
    expected = {
        PromptPath.PREFILL: prefill_seconds(prefill, tokens),
        PromptPath.EXTEND: extend_seconds(decode, tokens),
    }
    assert choose_path(expected, tokens, prefill, decode) is PromptPath(path)


@pytest.mark.parametrize(
    ("queue", "batch_limit", "seconds"),
    [
        # Places free, and room in the batch.
        (Queue(3, 0, 4, False, 8.0, 6.0), 4, 0.0),
        # All places taken: one comes free each 8 / 4 s.
        (Queue(4, 0, 4, True, 8.0, 6.0), 9, 2.0),
        (Queue(4, 2, 4, True, 8.0, 6.0), 9, 6.0),
        # Places free but not in the batch, of which one comes free each 6 / 2 s.
        (Queue(2, 0, 9, False, 8.0, 6.0), 2, 3.0),
        (Queue(4, 0, 9, False, 8.0, 6.0), 2, 9.0),
        # The KV pool is full: some wait although places are free.
        (Queue(2, 1, 9, True, 8.0, 6.0), 9, 8.0),
        # Many arrive at once, and are just being let in.
        (Queue(1, 7, 9, False, 8.0, 6.0), 9, 0.0),
        # Nothing is known yet.
        (Queue(9, 9, 4, True), 2, 0.0),
    ],
)
def test_queue(queue: Queue, batch_limit: int, seconds: float) -> None:
    decode = DecodeLoad(batch_limit=batch_limit)
    assert queue_seconds(queue, decode) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("objective", "alone", "factor", "limit"),
    [
        (30.0, 1.0, 1.0, 30.0),
        (30.0, 1.0, 0.5, 15.0),
        # A prompt that takes longer than promised by itself is not refused for that.
        (30.0, 100.0, 1.0, 200.0),
        (30.0, 100.0, 0.0, math.inf),
    ],
)
def test_limit(objective: float, alone: float, factor: float, limit: float) -> None:
    assert limit_seconds(objective, alone, factor) == limit


def test_predictions_follow_what_happens() -> None:
    correction = Correction()
    assert correction.apply(1.0) == 1.0
    for predicted in (1.0, 2.0, 1.0, 2.0):
        correction.observe(predicted, 0.1 + 1.5 * predicted)
    assert correction.apply(2.0) == pytest.approx(3.1, rel=0.1)


def test_one_disaster_does_not_decide_for_ever() -> None:
    correction = Correction()
    correction.observe(0.01, 600.0)
    assert correction.apply(1.0) <= 2.5
    for _ in range(200):
        correction.forget(0.01)
    assert correction.apply(0.01) == pytest.approx(0.01, rel=0.1)


def test_what_is_under_way_counts_and_leaves() -> None:
    outlook = Outlook()
    assert outlook.ttft_seconds(100) == 0.0
    outlook.told(PrefillLoad(PREFILL, 0))
    outlook.told(DecodeLoad(0.1, EXTEND, batch_limit=2))
    assert outlook.ttft_seconds(20) == pytest.approx(0.4)
    assert outlook.ttft_seconds(1000) == pytest.approx(2.0)
    with outlook.computing(PromptPath.PREFILL, 4000) as pending:
        assert outlook.prefill.pending_tokens == 4000
        pending.progressed(0.75)
        assert outlook.prefill.pending_tokens == 1000
    assert outlook.prefill.pending_tokens == 0
    with outlook.streaming(0.5), outlook.streaming(0.2):
        assert (outlook.decode.num_streams, outlook.decode.tpot_seconds) == (2, 0.2)
        assert outlook.wait_seconds(Queue(1, 0, 9, False), 20) > 0.0
    assert (outlook.decode.num_streams, outlook.decode.tpot_seconds) == (0, math.inf)
    assert outlook.wait_seconds(Queue(0, 0, 9, False), 20) == 0.0
    assert outlook.num_chosen == {PromptPath.PREFILL: 1, PromptPath.EXTEND: 0}


def test_a_moment_of_slowness_does_not_shrink_the_batch() -> None:
    outlook = Outlook()
    outlook.told(DecodeLoad(0.1, EXTEND, batch_limit=16))
    outlook.told(DecodeLoad(0.1, EXTEND, batch_limit=2))
    assert outlook.decode.batch_limit == 16
    for _ in range(10):
        outlook.told(DecodeLoad(0.1, EXTEND, batch_limit=2))
    assert outlook.decode.batch_limit == 2


def test_one_that_waits_too_long_speaks_for_those_who_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    outlook = Outlook()
    outlook.told(PrefillLoad(PREFILL, 0))
    with outlook.awaiting_first_token(1000, 10):
        now += 3.9
        # It may take twice the 2 s that its prompt takes.
        assert outlook.wait_seconds(Queue(1, 0, 9, False), 20) == 0.0
        now += 5.1
        assert outlook.wait_seconds(Queue(1, 0, 9, False), 20) == pytest.approx(5.0)
    assert outlook.wait_seconds(Queue(1, 0, 9, False), 20) == 0.0


def test_a_path_may_be_forced() -> None:
    outlook = Outlook(PromptPath.EXTEND)
    assert outlook.choose(10**6) is PromptPath.EXTEND
    outlook.told(PrefillLoad(PREFILL, 0))
    outlook.told(DecodeLoad(0.1, EXTEND))
    assert outlook.ttft_seconds(10_000) == pytest.approx(120.0)
