"""Real processes, real segments: what comes out, and what it equals."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from headwater.client import Client
from headwater.errors import (
    DeadlineError,
    InvalidRequestError,
    PromptTooLongError,
)
from headwater.generation import FinishReason, SamplingParams, TextEvent
from headwater.shm import list_segments
from tests.exactly import exactly
from tests.integration.reference import greedy
from tests.tiny_model import CONTEXT, VOCAB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.integration.stack import Stack

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
PROMPT = tuple(range(40, 97))


async def collect(events: AsyncIterator[TextEvent]) -> tuple[list[tuple[int, float]], TextEvent]:
    """All tokens with their log probabilities, and the last event."""
    tokens = []
    async for event in events:
        last = event
        tokens += [(token.id, token.logprob or 0.0) for token in event.tokens]
    return tokens, last


async def test_hand_over_changes_nothing(stack: Stack, tiny_model: Path, shm_prefix: str) -> None:
    """Prefill here, decode there, KV in shared memory: bit for bit what one process computes."""
    expected = greedy(tiny_model, shm_prefix, PROMPT, 40)
    async with Client(stack.addresses["router"]) as client:
        for _ in range(2):
            tokens, last = await collect(client.generate(PROMPT, GREEDY))
            # Log probabilities travel as FP32.
            assert [i for i, _ in tokens] == [i for i, _ in expected]
            assert [p for _, p in tokens] == [p for _, p in expected]
            assert last.finish_reason is FinishReason.LENGTH
            assert last.usage is not None
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (57, 40)
            assert last.timings is not None
            assert 0 < last.timings.time_to_first_token_seconds < last.timings.total_seconds


async def test_exact_activations_are_exact_in_both_engines(
    make_stack: Callable[..., Stack], tiny_model: Path, shm_prefix: str
) -> None:
    rounded = greedy(tiny_model, shm_prefix, PROMPT, 4)
    with exactly():
        expected = greedy(tiny_model, shm_prefix, PROMPT, 4)
    assert expected != rounded
    stack = make_stack("model.exact_activations=true")
    stack.start()
    async with Client(stack.addresses["router"]) as client:
        tokens, _ = await collect(client.generate(PROMPT, replace(GREEDY, max_tokens=4)))
    assert tokens == expected


async def test_chunked_prefill_gives_the_same_tokens(
    make_stack: Callable[..., Stack], tiny_model: Path, shm_prefix: str
) -> None:
    stack = make_stack("prefill.chunk_tokens=10")
    stack.start()
    expected = greedy(tiny_model, shm_prefix, PROMPT, 40)
    async with Client(stack.addresses["router"]) as client:
        tokens, _ = await collect(client.generate(PROMPT, GREEDY))
    assert [i for i, _ in tokens] == [i for i, _ in expected]


async def test_several_at_once_and_cancellation(stack: Stack) -> None:
    """More requests than the batch holds, some of which leave; the pool is empty afterwards."""

    async def one(i: int) -> int:
        async with Client(stack.addresses["router"]) as client:
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=True)
            seen = 0
            async for event in client.generate(f"request {i}", params):
                seen += len(event.tokens)
                if i % 3 == 0 and seen > 5:
                    break
            return seen

    counts = await asyncio.gather(*(one(i) for i in range(24)))
    assert all(count == 60 for i, count in enumerate(counts) if i % 3)
    await wait_until_idle(stack)


async def wait_until_idle(stack: Stack) -> None:
    """Returns once decode says that it has no lease and no request."""
    from headwater.rpc.channel import open_channel
    from headwater.v1 import decode_service_pb2, decode_service_pb2_grpc

    async with open_channel(stack.addresses["decode"]) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        while True:
            status = await stub.GetStatus(decode_service_pb2.GetDecodeStatusRequest())
            if status.kv_leases == 0 and status.running_requests == 0:
                assert status.kv_free_blocks == status.kv_layout.num_blocks
                return
            await asyncio.sleep(0.01)


async def test_a_second_turn_finds_the_first(stack: Stack) -> None:
    """The prefix cache: what two prompts share is computed once, and changes no token."""
    alone = make_prompt(200)
    async with Client(stack.addresses["router"]) as client:
        first, last = await collect(client.generate(alone, GREEDY))
        second = (*alone, *(token for token, _ in first), 7, 7, 7)
        _, last = await collect(client.generate(second, GREEDY))
        assert last.usage is not None
        # Blocks have 16 tokens; the first answer's last token was never computed.
        assert last.usage.cached_tokens >= len(second) - 3 - 1 - 16
        again, last = await collect(client.generate(alone, GREEDY))
        assert last.usage is not None
        assert last.usage.cached_tokens == 192
        assert again == first


def make_prompt(length: int) -> tuple[int, ...]:
    return tuple((i * i + 3) % 256 for i in range(length))


async def test_several_answers_to_one_prompt(stack: Stack) -> None:
    from headwater.rpc.channel import open_channel
    from headwater.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc

    async def answers(n: int, seed: int) -> dict[int, list[int]]:
        request = router_service_pb2.GenerateRequest(
            text="a prompt that does not end with a block",
            n=n,
            sampling=generation_pb2.SamplingParams(seed=seed, max_tokens=30, ignore_eos=True),
        )
        found: dict[int, list[int]] = {}
        async with open_channel(stack.addresses["router"]) as channel:
            stub = router_service_pb2_grpc.RouterServiceStub(channel)
            async for reply in stub.Generate(request):
                found.setdefault(reply.index, []).extend(t.token_id for t in reply.tokens)
        return found

    together = await answers(3, seed=10)
    assert {index: len(tokens) for index, tokens in together.items()} == {0: 30, 1: 30, 2: 30}
    for index in range(3):
        alone = await answers(1, seed=10 + index)
        assert alone[0] == together[index]
    assert together[0] != together[1]
    await wait_until_idle(stack)


async def test_a_seed_repeats_through_the_whole_stack(stack: Stack) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    async with Client(stack.addresses["router"]) as client:
        first, _ = await collect(client.generate("seeded", params))
        again, _ = await collect(client.generate("seeded", params))
    assert first == again


async def test_chat_stop_and_text(stack: Stack) -> None:
    async with Client(stack.addresses["router"]) as client:
        text = "".join([e.text async for e in client.generate("abc", GREEDY)])
        assert text
        stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text[i : i + 2].isascii())
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,))
        events = [e async for e in client.generate("abc", params)]
        assert "".join(e.text for e in events) == text[: text.index(stop)]
        assert events[-1].finish_reason is FinishReason.STOP
        answer, last = await collect(client.chat([("user", "hello")], GREEDY))
        assert len(answer) == 40
        assert last.usage is not None
        assert last.usage.prompt_tokens == len("user\nhello") + len("assistant\n") + 3


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, InvalidRequestError, "must not be empty"),
        ((), None, InvalidRequestError, "must not be empty"),
        ((VOCAB,), None, InvalidRequestError, "outside the vocabulary"),
        (tuple([5] * CONTEXT), None, PromptTooLongError, str(CONTEXT)),
        ("x", SamplingParams(max_tokens=CONTEXT), PromptTooLongError, str(CONTEXT)),
        ("x", SamplingParams(logit_bias={VOCAB: 1.0}), InvalidRequestError, "logit_bias"),
        ("x", SamplingParams(stop_token_ids=(VOCAB,)), InvalidRequestError, "stop_token_ids"),
    ],
)
async def test_bad_requests_get_a_sentence(
    shared_stack: Stack,
    prompt: str | tuple[int, ...],
    params: SamplingParams | None,
    error: type[InvalidRequestError],
    message: str,
) -> None:
    async with Client(shared_stack.addresses["router"]) as client:
        with pytest.raises(error, match=message):
            await collect(client.generate(prompt, params))
        tokens, _ = await collect(client.generate("still there", GREEDY))
        assert len(tokens) == 40


async def test_bad_sampling_values_on_the_wire(shared_stack: Stack) -> None:
    """Values that our own client would not send."""
    import grpc

    from headwater.rpc.channel import open_channel
    from headwater.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc

    async with open_channel(shared_stack.addresses["router"]) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        bad: tuple[tuple[str, Any], ...] = (
            ("temperature", -1.0),
            ("temperature", float("nan")),
            ("top_p", float("nan")),
            ("min_p", -0.5),
            ("repetition_penalty", -1.0),
            ("presence_penalty", float("inf")),
        )
        for field, value in bad:
            request = router_service_pb2.GenerateRequest(
                text="x", sampling=generation_pb2.SamplingParams(**{field: value})
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [reply async for reply in stub.Generate(request)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"sampling.{field}" in (caught.value.details() or "")


async def test_deadline(shared_stack: Stack) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    async with Client(shared_stack.addresses["router"]) as client:
        with pytest.raises(DeadlineError):
            await collect(client.generate("slow", params, timeout_seconds=0.1))
    await wait_until_idle(shared_stack)


def test_weights_exist_once_and_stay(stack: Stack, shm_prefix: str) -> None:
    names = [s.name for s in list_segments(f"{shm_prefix}.")]
    assert sum(".weights." in name for name in names) == 1
    assert sum(".kv." in name for name in names) == 1
    stack.stop()
    names = [s.name for s in list_segments(f"{shm_prefix}.")]
    assert [".weights." in name for name in names] == [True]


def test_the_router_never_imports_torch() -> None:
    code = (
        "import json, sys; import headwater.services.router.service, headwater.client; "
        "print(json.dumps([m for m in ('torch', 'headwater.model.transformer') "
        "if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(result.stdout) == []
