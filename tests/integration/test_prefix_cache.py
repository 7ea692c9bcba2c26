"""The prefix cache on real processes: what is shared is computed once, and that is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from headwater.client import Client
from headwater.generation import SamplingParams, Usage
from headwater.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from tests.integration.test_generate import collect, make_prompt, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.stack import Stack

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)


def computed_by_prefill(stack: Stack) -> int:
    """Prompt tokens that the prefill process has computed since its start."""
    with grpc.insecure_channel(stack.addresses["prefill"]) as channel:
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_service_pb2.GetPrefillStatusRequest()
        return int(stub.GetStatus(request).prompt_tokens)


async def test_a_shared_beginning_is_computed_once(
    make_stack: Callable[..., Stack], roomy_model: Path
) -> None:
    """Across requests, and across a restart of the prefill process, for decode owns the pool."""
    stack = make_stack("kv.pool_tokens=8192", model=roomy_model)
    stack.start()
    shared = make_prompt(2000)
    # Long enough that the rest, too, is worth the prefill process.
    rests = [tuple((i * step + 1) % 256 for i in range(500)) for step in (3, 5)]

    async def ask(prompt: tuple[int, ...]) -> tuple[list[tuple[int, float]], Usage]:
        async with Client(stack.addresses["router"]) as client:
            tokens, last = await collect(client.generate(prompt, PARAMS))
        assert last.usage is not None
        return tokens, last.usage

    _, usage = await ask(shared)
    assert usage.cached_tokens == 0
    assert computed_by_prefill(stack) == 2000

    first, usage = await ask(shared + rests[0])
    assert 1900 <= usage.cached_tokens <= 2000
    assert computed_by_prefill(stack) == 2000 + len(rests[0]) + (2000 - usage.cached_tokens)

    stack.kill("prefill")
    stack.start("prefill")
    stack.wait_until_serving("router")
    _, usage = await ask(shared + rests[1])
    assert 1900 <= usage.cached_tokens <= 2000
    assert computed_by_prefill(stack) == len(rests[1]) + (2000 - usage.cached_tokens)

    # What lay in the cache changed no bit: another stack, without it, says the same.
    await wait_until_idle(stack)
    stack.kill("decode")
    stack.start("decode")
    stack.wait_until_serving("router")
    again, usage = await ask(shared + rests[0])
    assert usage.cached_tokens == 0
    assert again == first
