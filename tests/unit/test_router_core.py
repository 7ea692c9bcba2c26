"""The life of a request in the router, against engines that play a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from headwater.errors import (
    CancelledError,
    HeadwaterError,
    InternalError,
    InvalidRequestError,
    KvExhaustedError,
    PromptTooLongError,
    QueueFullError,
    UnavailableError,
)
from headwater.generation import FinishReason, SamplingParams, TextEvent, Token, TokenEvent, Usage
from headwater.services.router.requests import (
    ChatPrompt,
    Prompt,
    RouterRequest,
    TextPrompt,
    TokenPrompt,
)
from tests.unit.router_fakes import Rig

ANSWER = " Paris. 😀 Then stop here, and go on."
HELLO = TextPrompt("Hello")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(ANSWER)
    yield rig
    await rig.core.stop()
    assert rig.core.admission.num_running == 0
    assert rig.core.admission.num_waiting == 0


async def _collect(
    rig: Rig, prompt: Prompt = HELLO, deadline: float | None = None, **sampling: Any
) -> list[TextEvent]:
    request = RouterRequest(prompt, SamplingParams(**sampling))
    async with aclosing(rig.core.generate(request, deadline)) as events:
        return [event async for event in events]


def _text(events: list[TextEvent]) -> str:
    return "".join(event.text for event in events)


async def test_answer_with_usage_and_timings(rig: Rig) -> None:
    events = await _collect(rig)
    assert _text(events) == ANSWER
    assert [event.prefill_progress for event in events[:3]] == [0.5, 1.0, None]
    last = events[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.stop_token_id == 2
    num_prompt = len(rig.model.tokenizer.encode("Hello", add_special_tokens=True))
    assert last.usage == Usage(num_prompt, len(rig.decode.script), min(3, num_prompt - 1))
    assert all(event.finish_reason is None for event in events[:-1])
    timings = last.timings
    assert timings is not None
    assert 0 < timings.time_to_first_token_seconds <= timings.total_seconds
    parts = timings.queue_seconds + timings.prefill_seconds + timings.handover_seconds
    assert parts == pytest.approx(timings.time_to_first_token_seconds)
    # decode ends the lease itself.
    assert rig.decode.released == []
    assert rig.core.num_finished == 1
    assert rig.core.generated_tokens.total == len(rig.decode.script)


async def test_chat_is_laid_out_by_the_template(rig: Rig) -> None:
    await _collect(rig, ChatPrompt((("user", "Hello"),)))
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert rig.decode.prompt == rig.model.tokenizer.encode(expected, add_special_tokens=False)


async def test_absent_max_tokens_is_what_the_context_holds(rig: Rig) -> None:
    await _collect(rig, TokenPrompt((5, 6, 7)))
    assert rig.decode.reserved == [(3, 509)]
    assert rig.decode.sampling is not None
    seed = rig.decode.sampling.seed
    assert seed is not None, "a request can go on elsewhere only with a known seed"
    assert rig.decode.sampling == SamplingParams(max_tokens=509, seed=seed)


async def test_the_longest_prompt_that_fits(rig: Rig) -> None:
    await _collect(rig, TokenPrompt((5,) * 511), max_tokens=1)
    assert rig.decode.reserved == [(511, 1)]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (TextPrompt(""), {}, "text: must not be empty"),
        (TokenPrompt(()), {}, "token_ids.ids: must not be empty"),
        (TokenPrompt((1, 384)), {}, r"token_ids.ids\[1\]: token id 384 is outside .*0 to 383"),
        (ChatPrompt(()), {}, "chat.messages: must not be empty"),
        (ChatPrompt((("alien", "Hi"),)), {}, "chat: .*unknown role alien"),
        (HELLO, {"stop_token_ids": (384,)}, "sampling.stop_token_ids: token id 384"),
        (HELLO, {"logit_bias": {9999: 1.0}}, "sampling.logit_bias: token id 9999"),
    ],
)
async def test_requests_that_cannot_be(
    rig: Rig, prompt: Prompt, sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await _collect(rig, prompt, **sampling)
    assert rig.decode.reserved == []


async def test_too_long_names_the_numbers(rig: Rig) -> None:
    with pytest.raises(PromptTooLongError, match=r"512 tokens, but .* at most 512"):
        await _collect(rig, TokenPrompt((5,) * 512))
    with pytest.raises(PromptTooLongError, match=r"12 prompt tokens and 501 new .* at most 500"):
        await _collect(rig, TokenPrompt((5,) * 12), max_tokens=501)


async def test_stop_string_cuts_the_text_and_cancels_decode(rig: Rig) -> None:
    events = await _collect(rig, stop=("stop here",))
    assert _text(events) == ANSWER.partition("stop here")[0]
    last = events[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.matched_stop == "stop here"
    assert last.usage is not None
    assert last.usage.completion_tokens < len(rig.decode.script)
    assert rig.decode.is_cancelled
    assert rig.decode.sampling is not None
    assert rig.decode.sampling.stop == ()
    await rig.core.stop()
    assert rig.decode.released == [1]


async def test_stop_string_may_be_kept(rig: Rig) -> None:
    events = await _collect(rig, stop=("stop here",), include_stop=True)
    assert _text(events) == ANSWER.partition(", and")[0]


async def test_text_held_for_a_stop_string_comes_at_the_end(rig: Rig) -> None:
    assert _text(await _collect(rig, stop=("on.!",))) == ANSWER


async def test_tokens_past_a_stop_string_do_not_count(rig: Rig) -> None:
    tokens = tuple(token for event in rig.decode.script for token in event.tokens)
    rig.decode.script = [TokenEvent(tokens, FinishReason.LENGTH)]
    (event,) = [e for e in await _collect(rig, stop=("Paris",)) if e.prefill_progress is None]
    assert event.text == " "
    assert event.tokens == tokens[:1]
    assert event.usage is not None
    assert event.usage.completion_tokens == 1


async def test_tokens_only(rig: Rig) -> None:
    request = RouterRequest(HELLO, wants_text=False)
    async with aclosing(rig.core.generate(request)) as stream:
        events = [event async for event in stream]
    assert _text(events) == ""
    assert sum(len(event.tokens) for event in events) == len(rig.decode.script)


async def test_full_pool_is_waited_for(rig: Rig) -> None:
    rig.decode.reserve_errors = [KvExhaustedError("full", 1), KvExhaustedError("full", 1)]
    assert _text(await _collect(rig)) == ANSWER


async def test_what_never_fits_is_refused(rig: Rig) -> None:
    rig.decode.reserve_errors = [PromptTooLongError("max_new_tokens", "the pool holds 64 tokens")]
    with pytest.raises(PromptTooLongError, match="the pool holds 64"):
        await _collect(rig)


async def test_full_queue_is_refused() -> None:
    rig = Rig(ANSWER, max_running=1, max_waiting=0)
    rig.prefill.gate.clear()
    first = asyncio.create_task(_collect(rig))
    await rig.prefill.started.wait()
    with pytest.raises(QueueFullError):
        await _collect(rig)
    rig.prefill.gate.set()
    assert _text(await first) == ANSWER
    await rig.core.stop()


@pytest.mark.parametrize("engine", ["prefill", "decode"])
async def test_engine_that_does_not_serve_is_named(rig: Rig, engine: str) -> None:
    getattr(rig, engine).is_serving = False
    with pytest.raises(UnavailableError, match=f"{engine} at fake:. is not serving"):
        await _collect(rig)


@pytest.mark.parametrize("engine", ["prefill", "decode"])
async def test_engine_failure_gives_the_lease_back(rig: Rig, engine: str) -> None:
    getattr(rig, engine).error = UnavailableError(f"{engine} went away")
    with pytest.raises(UnavailableError, match=f"{engine} went away"):
        await _collect(rig)
    await rig.core.stop()
    assert rig.decode.released == [1]


async def test_stream_without_an_end_is_our_fault(rig: Rig) -> None:
    rig.decode.script = [TokenEvent((Token(5),))]
    with pytest.raises(InternalError, match="without a finish reason"):
        await _collect(rig)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_cancelling_the_caller_reaches_the_engine(rig: Rig, stage: str) -> None:
    engine = rig.prefill if stage == "prefill" else rig.decode
    engine.gate.clear()
    asking = asyncio.create_task(_collect(rig))
    await engine.started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.is_cancelled
    await rig.core.stop()
    assert rig.decode.released == [1]


async def test_closing_the_stream_reaches_the_engine(rig: Rig) -> None:
    events = rig.core.generate(RouterRequest(HELLO))
    async for event in events:
        if event.tokens:
            break
    await events.aclose()
    assert rig.decode.is_cancelled
    await rig.core.stop()
    assert rig.decode.released == [1]


async def test_lease_granted_to_a_caller_that_left_is_given_back(rig: Rig) -> None:
    rig.decode.reserve_gate.clear()
    asking = asyncio.create_task(_collect(rig))
    while not rig.core.admission.num_waiting:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    rig.decode.reserve_gate.set()
    await rig.core.stop()
    assert rig.decode.released == [1]


@pytest.mark.parametrize("stage", ["prefill", "decode", "queue"])
async def test_abort_by_name(rig: Rig, stage: str) -> None:
    started = rig.prefill.started if stage == "prefill" else rig.decode.started
    rig.prefill.gate.clear() if stage == "prefill" else rig.decode.gate.clear()
    if stage == "queue":
        rig.decode.reserve_gate.clear()
    request = RouterRequest(HELLO, request_id="mine")

    async def ask() -> None:
        async with aclosing(rig.core.generate(request)) as events:
            async for _ in events:
                pass

    asking = asyncio.create_task(ask())
    if stage == "queue":
        while not rig.core.admission.num_waiting:
            await asyncio.sleep(0)
    else:
        await started.wait()
    assert not rig.core.abort("other")
    assert rig.core.abort("mine")
    with pytest.raises(CancelledError, match="aborted"):
        await asking
    assert asking.cancelling() == 0
    assert not rig.core.abort("mine")
    rig.decode.reserve_gate.set()
    await rig.core.stop()
    assert rig.decode.released == [1] * len(rig.decode.reserved)


async def test_abort_between_two_events(rig: Rig) -> None:
    request = RouterRequest(HELLO, request_id="mine")
    async with aclosing(rig.core.generate(request)) as events:
        await anext(events)
        assert rig.core.abort("mine")
        with pytest.raises(CancelledError):
            await anext(events)


async def test_leases_are_renewed_while_they_are_in_use(rig: Rig) -> None:
    rig.decode.ttl_seconds = 0.003
    rig.prefill.gate.clear()
    asking = asyncio.create_task(_collect(rig))
    await rig.decode.renewed.wait()
    rig.decode.renewed.clear()
    await rig.decode.renewed.wait()
    rig.prefill.gate.set()
    assert _text(await asking) == ANSWER


async def test_deadline_goes_to_the_engines(rig: Rig) -> None:
    deadline = time.monotonic() + 3600
    await _collect(rig, deadline=deadline)
    assert rig.prefill.deadline == deadline


async def test_many_requests_at_once() -> None:
    rig = Rig(ANSWER, max_running=3, max_waiting=40)
    answers = await asyncio.gather(*(_collect(rig) for _ in range(40)))
    assert {_text(events) for events in answers} == {ANSWER}
    assert rig.core.num_finished == 40
    await rig.core.stop()


async def test_request_id_has_a_limit() -> None:
    with pytest.raises(HeadwaterError, match="request_id: at most 128 characters, got 129"):
        RouterRequest(HELLO, request_id="x" * 129)
