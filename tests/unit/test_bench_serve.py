"""`headwater bench serve` without a server: what is sent when, and what the figures mean."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING

import pytest

from headwater.bench.serve.load import (
    LengthMix,
    LoadRequest,
    draw_requests,
    poisson_times,
    read_trace,
)
from headwater.bench.serve.run import Outcome, Run, run_closed, run_open
from headwater.bench.serve.scenarios import run_interference, run_subject, standard_set
from headwater.bench.serve.stats import Objectives, summarise, variation
from headwater.bench.serve.target import ModelLimits, Piece
from headwater.errors import ConfigError, InternalError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

LIMITS = ModelLimits("fake", 100, 4096)


class FakeTarget:
    """A turn of the loop per token of prompt and answer; refuses what is over `room`."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.under_way = 0
        self.most_under_way = 0
        self.requests: list[LoadRequest] = []
        self.refused_at: list[float] = []

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Piece, None]:
        self.requests.append(request)
        if self.under_way >= self.room:
            self.refused_at.append(asyncio.get_running_loop().time())
            raise QueueFullError("full", retry_after_ms=20)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            for _ in request.prompt:
                await asyncio.sleep(0)
            for _ in range(request.max_tokens):
                await asyncio.sleep(0)
                yield Piece(1)
            yield Piece(0, prompt_tokens=len(request.prompt), cached_tokens=3)
        finally:
            self.under_way -= 1

    async def limits(self) -> ModelLimits:
        return LIMITS

    async def close(self) -> None:
        pass


def test_mixes_are_parsed() -> None:
    assert LengthMix.parse("128:64") == LengthMix((128, 128), (64, 64))
    assert LengthMix.parse("1-9:2-3:0.5") == LengthMix((1, 9), (2, 3), 0.5)
    for text in ("128", "0:4", "9-1:4", "a:b", "1:2:0", "1:2:3:4"):
        with pytest.raises(ConfigError, match=f"--mix {text}"):
            LengthMix.parse(text)


def test_drawn_requests_share_what_they_should() -> None:
    mixes = [LengthMix((40, 60), (5, 9), 3.0), LengthMix((10, 10), (1, 1))]
    requests = draw_requests(
        mixes, 200, vocab_size=100, max_context_tokens=70, shared_tokens=20, seed=4
    )
    long = [request for request in requests if request.label == "40-60:5-9"]
    assert 120 < len(long) < 180
    assert {request.prompt[:20] for request in long} == {long[0].prompt[:20]}
    assert len({request.prompt[20:40] for request in long}) == len(long)
    assert all(5 <= request.max_tokens <= 9 for request in long)
    assert {len(r.prompt) for r in requests if r.label == "10:1"} == {10}
    with pytest.raises(ConfigError, match="context of 50"):
        draw_requests(mixes, 200, vocab_size=100, max_context_tokens=50)


def test_poisson_times_have_the_rate() -> None:
    times = list(itertools.islice(poisson_times(20.0, seed=1), 4000))
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert times[-1] / len(times) == pytest.approx(1 / 20, rel=0.06)
    # Independent arrivals: the standard deviation of the waits equals their mean.
    assert variation(waits) == pytest.approx(1.0, abs=0.06)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 700, "output_length": 2, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 9999, "output_length": 50},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    requests, num_cut = read_trace(path, vocab_size=100, max_context_tokens=4096, speed=2.0)
    assert [request.at_seconds for request in requests] == [0.5, 1.0, 1.5]
    assert [len(request.prompt) for request in requests] == [700, 600, 4095]
    assert requests[0].prompt[:512] == requests[1].prompt[:512]
    assert requests[0].prompt[512:600] != requests[1].prompt[512:600]
    assert (num_cut, requests[2].max_tokens) == (1, 1)
    for text in ("[]", "{}", '{"timestamp": "x"}', "no"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="line 1"):
            read_trace(path, vocab_size=100, max_context_tokens=4096)
    path.write_text("")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(path, vocab_size=100, max_context_tokens=4096)


async def test_a_closed_loop_keeps_so_many_under_way() -> None:
    target = FakeTarget()
    run = await run_closed(target, [LoadRequest("x", (1,), 5)] * 20, 3)
    assert (target.most_under_way, len(run.outcomes)) == (3, 20)
    assert all(len(outcome.token_times) == 5 for outcome in run.outcomes)


async def test_a_refused_caller_waits_as_long_as_it_is_told() -> None:
    target = FakeTarget(room=0)
    run = await run_closed(target, [LoadRequest("x", (1,), 5)] * 4, 1)
    assert [outcome.error for outcome in run.outcomes] == ["QUEUE_FULL"] * 4
    waits = [after - before for before, after in itertools.pairwise(target.refused_at)]
    assert min(waits) >= 0.019


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    target = FakeTarget(room=4)
    run = await run_open(target, [LoadRequest("x", (1,), 50, at_seconds=0.0)] * 9)
    assert target.most_under_way == 4
    assert [outcome.error for outcome in run.outcomes].count("QUEUE_FULL") == 5
    # A request counts from when it was due, not from when the sender got round to it.
    assert len({outcome.sent_at for outcome in run.outcomes}) == 1


def test_figures() -> None:
    good = Outcome("x", 10.0, 11.0, [10.5, 10.6, 10.8], prompt_tokens=7, cached_tokens=3)
    slow = Outcome("x", 10.0, 13.0, [12.0, 12.1, 12.2], prompt_tokens=5)
    refused = Outcome("x", 10.0, 10.0, error="QUEUE_FULL")
    summary = summarise("load", Run((good, slow, refused), 4.0), Objectives(1.0, 0.2))
    assert (summary.num_requests, summary.num_completed) == (3, 2)
    assert summary.errors == {"QUEUE_FULL": 1}
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (12, 3, 6)
    assert summary.ttft.p50 == pytest.approx(1.25)
    assert summary.tpot.mean == pytest.approx(0.125)
    assert summary.itl.mean == pytest.approx(0.125)
    assert summary.output_tokens_per_second == 1.5
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.goodput_per_second == 0.25
    # A pace that was asked for is not met by the fast one either.
    strict = summarise("load", Run((good, slow, refused), 4.0), Objectives(1.0, 0.1))
    assert strict.attainment == 0.0
    # Nothing asked for: whoever was answered was answered in time.
    assert summarise("load", Run((good, slow, refused), 4.0), Objectives()).attainment == 2 / 3


def test_variation() -> None:
    assert variation([5.0]) == 0.0
    assert variation([1.0, 3.0]) == pytest.approx(2**0.5 / 2)


def test_the_standard_set_fits_the_context() -> None:
    subjects, notes = standard_set(ModelLimits("large", 100, 131072))
    assert [subject.prompt for subject in subjects[2:]] == [10_000, 90_000]
    assert notes == []
    subjects, notes = standard_set(ModelLimits("middle", 100, 32768))
    assert [subject.prompt for subject in subjects[2:]] == [10_000, 32736]
    assert len(notes) == 1
    subjects, notes = standard_set(ModelLimits("small", 100, 8192))
    assert [subject.prompt for subject in subjects[2:]] == [906, 8160]
    assert notes[0] == "prefill-10k has 906 tokens: the model's context holds 8192"
    with pytest.raises(ConfigError, match="too short"):
        standard_set(ModelLimits("tiny", 100, 100))


async def test_a_subject_is_measured_with_prompts_of_its_own() -> None:
    target = FakeTarget()
    subject = standard_set(LIMITS)[0][2]
    row = await run_subject(target, LIMITS, subject, warm_ups=2, repeats=3, seed=0)
    assert row["repeats"] == 3
    assert row["prompt_tokens"] == len(target.requests[0].prompt)
    assert len({request.prompt for request in target.requests}) == 5
    target.room = 0
    with pytest.raises(InternalError, match="full"):
        await run_subject(target, LIMITS, subject, warm_ups=0, repeats=1, seed=0)


async def test_interference_compares_the_gaps_of_one_stream() -> None:
    target = FakeTarget()
    row = await run_interference(target, LIMITS, prompt_tokens=99, repeats=2, seed=0)
    assert row["alone_tokens"] > 40
    assert row["beside_tokens"] >= 1
    assert row["ratio"] == row["beside_tpot_seconds"] / row["alone_tpot_seconds"]
    assert target.under_way == 0, "the stream is ended"
    with pytest.raises(InternalError, match="ended early"):
        await run_interference(target, LIMITS, prompt_tokens=999, repeats=9, seed=0)
    target.room = 1
    with pytest.raises(InternalError, match="the long prompt: full"):
        await run_interference(target, LIMITS, prompt_tokens=99, repeats=1, seed=0)
    target.room = 0
    with pytest.raises(QueueFullError):
        await run_interference(target, LIMITS, prompt_tokens=99, repeats=1, seed=0)
    with pytest.raises(ConfigError, match="--prompt-tokens 4096"):
        await run_interference(target, LIMITS, prompt_tokens=4096, repeats=1, seed=0)
