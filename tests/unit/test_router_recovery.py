"""What the router makes of an engine that dies: every token once, or a clear error in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.errors import UnavailableError
from headwater.generation import FinishReason, SamplingParams, TextEvent
from headwater.services.router.requests import RouterRequest, TextPrompt
from tests.unit.router_fakes import Rig

ANSWER = "an answer that is long enough to be cut in several places"


async def collect(rig: Rig, n: int = 1, **sampling: Any) -> list[TextEvent]:
    request = RouterRequest(TextPrompt("question"), SamplingParams(**sampling), n=n)
    events = [event async for event in rig.core.generate(request)]
    await rig.core.stop()
    return events


def text_of(events: list[TextEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if event.index == index)


async def test_every_token_once_however_often_decode_dies() -> None:
    rig = Rig(ANSWER, recovery_seconds=60.0)
    rig.decode.deaths = {0, 3, 7, 8}
    events = await collect(rig)
    assert text_of(events) == ANSWER
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == len(rig.decode.script)
    # Each new lease holds the prompt and what was answered so far.
    prompt = rig.decode.reserved[0][0]
    assert [tokens - prompt for tokens, _ in rig.decode.reserved] == [0, 0, 3, 7, 8]
    assert rig.core.admission.num_running == 0


async def test_the_seed_is_fixed_before_the_first_token() -> None:
    rig = Rig(ANSWER, recovery_seconds=60.0)
    rig.decode.deaths = {4}
    await collect(rig)
    seeds = {sampling.seed for sampling in rig.decode.samplings}
    assert len(rig.decode.samplings) == 2
    assert len(seeds) == 1
    assert seeds != {None}


async def test_without_patience_the_loss_is_told() -> None:
    rig = Rig(ANSWER)
    rig.decode.deaths = {4}
    with pytest.raises(UnavailableError, match="died at 4"):
        await collect(rig)
    assert rig.core.admission.num_running == 0


async def test_an_engine_that_stays_away_ends_the_request() -> None:
    rig = Rig(ANSWER, recovery_seconds=0.3)
    rig.decode.deaths = {4}
    events: list[TextEvent] = []

    async def listen() -> None:
        async for event in rig.core.generate(RouterRequest(TextPrompt("question"))):
            events.append(event)
            rig.decode.is_serving = False

    with pytest.raises(UnavailableError, match="died at 4"):
        await listen()
    assert ANSWER.startswith(text_of(events))


async def test_a_prefill_that_dies_is_asked_again() -> None:
    rig = Rig(ANSWER, recovery_seconds=60.0)
    rig.prefill.error = UnavailableError("prefill died")

    async def heal() -> None:
        while not rig.decode.reserved:
            await asyncio.sleep(0)
        rig.prefill.error = None

    healing = asyncio.create_task(heal())
    assert text_of(await collect(rig)) == ANSWER
    await healing
    assert len(rig.decode.reserved) >= 1


async def test_several_answers_share_a_prompt_and_differ_in_seed() -> None:
    rig = Rig(ANSWER, recovery_seconds=60.0)
    rig.decode.deaths = {5}
    events = await collect(rig, n=3, seed=2**64 - 1)
    for index in range(3):
        assert text_of(events, index) == ANSWER
        ends = [e for e in events if e.index == index and e.finish_reason is not None]
        assert len(ends) == 1
        assert ends[0].usage is not None
    assert rig.decode.num_forks == 2
    assert {sampling.seed for sampling in rig.decode.samplings} == {2**64 - 1, 0, 1}


async def test_answers_go_on_when_decode_dies_before_the_fork() -> None:
    rig = Rig(ANSWER, recovery_seconds=60.0)
    rig.decode.fork_errors = [UnavailableError("decode died")]
    events = await collect(rig, n=3)
    assert [text_of(events, index) for index in range(3)] == [ANSWER] * 3
    assert rig.decode.num_forks == 1
    # One lease for the prompt, and one for the answer that had to begin anew.
    assert len(rig.decode.reserved) == 2
