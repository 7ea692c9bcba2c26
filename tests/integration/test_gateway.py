"""SMG in front of our router, with scripted engines behind it: what HTTP clients get."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from headwater.errors import ResourceError, UnavailableError
from headwater.rpc.server import Server
from headwater.services.router.router import Router, build_router
from headwater.services.router.text.tokenizer import Tokenizer
from tests.integration.fake_engines import (
    EOS_TOKEN_ID,
    FakeDecode,
    FakePrefill,
    serving_decode,
    serving_prefill,
)
from tests.integration.gateway import gateway, until_ready
from tests.integration.router_rig import MODEL_DIR, start_router
from tests.integration.stack import free_port

MODEL_NAME = "tiny"
ANSWER = " Paris. 😀 Then stop here, and go on."


@dataclass
class Stack:
    """Fakes, router and gateway, all running."""

    prefill: FakePrefill
    decode: FakeDecode
    router: Router
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    tokenizer = Tokenizer.load(MODEL_DIR)
    script = [*tokenizer.encode(ANSWER, add_special_tokens=False), EOS_TOKEN_ID]
    prefill, decode = FakePrefill(), FakeDecode(script=script)
    async with contextlib.AsyncExitStack() as exits:
        prefill_engine = await exits.enter_async_context(serving_prefill(prefill))
        decode_engine = await exits.enter_async_context(serving_decode(decode))
        router = build_router(
            MODEL_DIR,
            MODEL_NAME,
            prefill_engine.address,
            decode_engine.address,
            max_running=4,
            max_waiting=2,
        )
        server = Server("127.0.0.1:0", router.registrations)
        router_port = await start_router(router, server, exits)
        port = free_port()
        base_url = f"http://127.0.0.1:{port}"
        openai_client = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="unused", max_retries=0
        )
        anthropic_client = anthropic.AsyncAnthropic(
            base_url=base_url, api_key="unused", max_retries=0
        )
        await exits.enter_async_context(openai_client)
        await exits.enter_async_context(anthropic_client)
        process = await exits.enter_async_context(gateway(port, router_port, tmp_path))
        await until_ready(f"127.0.0.1:{port}", process)
        yield Stack(prefill, decode, router, openai_client, anthropic_client)


async def test_chat_completion(stack: Stack) -> None:
    reply = await stack.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}]
    )
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    (request,) = stack.decode.requests
    assert reply.usage.prompt_tokens == len(request.prompt_token_ids)
    assert reply.usage.completion_tokens == len(stack.decode.script)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = stack.router.core.model.tokenizer
    assert tuple(request.prompt_token_ids) == tokenizer.encode(prompt, add_special_tokens=False)


async def test_streamed_chat_ends_at_a_stop_string(stack: Stack) -> None:
    pieces = []
    finish_reason = None
    usage = None
    async for chunk in await stack.openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Hello"}],
        stop=["stop here"],
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            finish_reason = choice.finish_reason or finish_reason
    assert "".join(pieces) == ANSWER.partition("stop here")[0]
    assert len([piece for piece in pieces if piece]) > 3
    assert finish_reason == "stop"
    assert usage is not None
    assert usage.completion_tokens < len(stack.decode.script)
    await stack.decode.freed.wait()


async def test_completion(stack: Stack) -> None:
    reply = await stack.openai.completions.create(
        model=MODEL_NAME, prompt="The capital of France is", max_tokens=2, temperature=0, seed=-1
    )
    assert reply.choices[0].text == " Paris."
    assert reply.choices[0].finish_reason == "length"
    (request,) = stack.decode.requests
    assert request.sampling.temperature == 0
    assert request.sampling.top_p == 1
    assert request.sampling.max_tokens == 2


async def test_log_probabilities(stack: Stack) -> None:
    reply = await stack.openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Hello"}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=2,
    )
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert [entry.token for entry in reply.choices[0].logprobs.content] == [" Paris", "."]
    assert [len(entry.top_logprobs) for entry in reply.choices[0].logprobs.content] == [2, 2]


async def test_a_stop_token_is_not_text(stack: Stack) -> None:
    stop_id = stack.router.core.model.tokenizer.token_id("\u0120and")
    assert stop_id in stack.decode.script
    reply = await stack.openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Hello"}],
        extra_body={"stop_token_ids": [stop_id]},
    )
    assert reply.choices[0].message.content == ANSWER.partition(" and")[0]


async def test_anthropic_message(stack: Stack) -> None:
    reply = await stack.anthropic.messages.create(
        model=MODEL_NAME, max_tokens=50, messages=[{"role": "user", "content": "Hello"}]
    )
    (block,) = reply.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert reply.stop_reason == "end_turn"
    assert reply.usage.output_tokens == len(stack.decode.script)


async def test_streamed_anthropic_message(stack: Stack) -> None:
    async with stack.anthropic.messages.stream(
        model=MODEL_NAME,
        max_tokens=50,
        stop_sequences=["stop here"],
        messages=[{"role": "user", "content": "Hello"}],
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == ANSWER.partition("stop here")[0]
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == "stop here"


async def test_what_is_not_offered_is_refused_with_the_reason(stack: Stack) -> None:
    async def refusal(**options: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await stack.openai.chat.completions.create(
                model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], **options
            )
        return str(caught.value)

    assert "ask for at most 495" in await refusal(max_tokens=2000)
    assert not stack.decode.requests


async def test_several_answers(stack: Stack) -> None:
    reply = await stack.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], n=3
    )
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {ANSWER}


TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def script_tool_call(stack: Stack) -> None:
    """Lets the engine answer with a call, in the form that the gateway's constraint asks for."""
    call = json.dumps([{"name": "find_city", "parameters": {"city": "Rome"}}])
    tokenizer = Tokenizer.load(MODEL_DIR)
    stack.decode.script = [*tokenizer.encode(call, add_special_tokens=False), EOS_TOKEN_ID]


async def test_tool_calls_of_the_openai_client(stack: Stack) -> None:
    script_tool_call(stack)
    reply = await stack.openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Which city?"}],
        tools=[{"type": "function", "function": {"name": "find_city", "parameters": TOOL_SCHEMA}}],
        tool_choice="required",
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "find_city",
        {"city": "Rome"},
    )
    # The engine is held to it, too.
    schema = json.loads(stack.decode.requests[0].sampling.constraint.json_schema)
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == TOOL_SCHEMA


async def test_tool_calls_of_the_anthropic_client(stack: Stack) -> None:
    script_tool_call(stack)
    message = await stack.anthropic.messages.create(
        model=MODEL_NAME,
        max_tokens=100,
        messages=[{"role": "user", "content": "Which city?"}],
        tools=[{"name": "find_city", "input_schema": TOOL_SCHEMA}],
        tool_choice={"type": "any"},
    )
    [use] = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("find_city", {"city": "Rome"})


async def test_full_pool_and_lost_engine_have_their_own_status(stack: Stack) -> None:
    async def ask() -> str | None:
        reply = await stack.openai.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}]
        )
        return reply.choices[0].message.content

    stack.prefill.error = ResourceError("too many prompts wait")
    with pytest.raises(openai.RateLimitError, match="too many prompts wait"):
        await ask()
    stack.prefill.error = UnavailableError("stopping")
    for _ in range(12):  # more often than a circuit breaker would forgive
        with pytest.raises(openai.InternalServerError, match=r"prefill at .* retry") as caught:
            await ask()
        assert caught.value.status_code == 503
    stack.prefill.error = None
    assert await ask() == ANSWER


async def test_client_that_goes_away_stops_the_stream(stack: Stack) -> None:
    stack.decode.permits = asyncio.Semaphore(0)
    stream = await stack.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}], stream=True
    )
    await stack.decode.started.wait()
    await stream.close()
    # The gateway finds out when it wants to pass on the next token, or the one after.
    for _ in range(4):
        stack.decode.permits.release()
    await stack.decode.cancelled.wait()
    await stack.decode.freed.wait()


async def test_client_that_goes_away_stops_the_prefill(stack: Stack) -> None:
    stack.prefill.gate.clear()
    asking = asyncio.create_task(
        stack.openai.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "Hello"}]
        )
    )
    await stack.prefill.started.wait()
    asking.cancel()
    await stack.prefill.cancelled.wait()
    await stack.decode.freed.wait()
    with pytest.raises(asyncio.CancelledError):
        await asking
