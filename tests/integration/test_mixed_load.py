"""32 mixed requests in a pool far too small: each answer is, bit for bit, what it is alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from headwater.client import Client
from headwater.generation import SamplingParams
from headwater.v1 import decode_service_pb2, decode_service_pb2_grpc
from tests.integration.reference import greedy
from tests.integration.test_generate import wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.stack import Stack

SEED = 20
NUM_REQUESTS = 32
Answer = list[tuple[int, float]]


@dataclass
class Case:
    """A request, and after how many tokens its caller hangs up (None: never).

    It arrives when `follows` has given `after` tokens or has ended, so that arrivals are staggered
    and yet do not depend on time.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    hangs_up_after: int | None
    follows: int | None
    after: int
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


def make_cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    shared = [tuple(draw.randrange(256) for _ in range(length)) for length in (48, 80, 130)]
    cases = []
    for i in range(NUM_REQUESTS):
        beginning = shared[i % 3] if i % 4 else ()
        own = tuple(draw.randrange(256) for _ in range(draw.choice((1, 7, 16, 33, 90))))
        sampled = i % 5 == 4
        params = SamplingParams(
            temperature=0.9 if sampled else 0.0,
            seed=i if sampled else None,
            max_tokens=draw.choice((5, 40, 90, 130)),
            ignore_eos=True,
            logprobs=0,
        )
        hangs_up_after = draw.randrange(1, 5) if i % 6 == 5 else None
        follows = None if i < 4 else draw.randrange(i - 4, i)
        cases.append(
            Case(beginning + own, params, hangs_up_after, follows, after=draw.randrange(1, 4))
        )
    return cases


async def answer(stack: Stack, case: Case, on_tokens: Callable[[int], None]) -> Answer:
    """Its tokens and their log probabilities, up to where its caller hangs up."""
    tokens: Answer = []
    async with Client(stack.addresses["router"]) as client:
        async for event in client.generate(case.prompt, case.params):
            tokens += [(token.id, token.logprob or 0.0) for token in event.tokens]
            on_tokens(len(tokens))
            if case.hangs_up_after is not None and len(tokens) >= case.hangs_up_after:
                break
    return tokens


async def answer_among_others(stack: Stack, cases: list[Case], index: int) -> Answer:
    case = cases[index]
    followers = [other for other in cases if other.follows == index]
    if case.follows is not None:
        await case.arrived.wait()

    def on_tokens(count: int) -> None:
        for other in followers:
            if count >= other.after:
                other.arrived.set()

    try:
        return await answer(stack, case, on_tokens)
    finally:
        for other in followers:
            other.arrived.set()


def decode_status(stack: Stack) -> decode_service_pb2.GetDecodeStatusResponse:
    with grpc.insecure_channel(stack.addresses["decode"]) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        status: decode_service_pb2.GetDecodeStatusResponse = stub.GetStatus(
            decode_service_pb2.GetDecodeStatusRequest()
        )
        return status


async def test_mixed_requests_are_answered_as_if_alone(
    make_stack: Callable[..., Stack], tiny_model: Path, shm_prefix: str
) -> None:
    # 40 blocks of 16 tokens; the largest request alone needs 22.
    stack = make_stack(
        "kv.pool_tokens=640",
        "decode.max_batch=8",
        "prefill.chunk_tokens=64",
        "router.prompt_path=auto",
    )
    stack.start()
    print(f"seed {SEED}")
    cases = make_cases(SEED)
    alone = [await answer(stack, case, lambda _: None) for case in cases]
    await wait_until_idle(stack)
    before = decode_status(stack)
    assert before.preemptions == 0

    together = await asyncio.gather(
        *(answer_among_others(stack, cases, index) for index in range(NUM_REQUESTS))
    )
    await wait_until_idle(stack)
    status = decode_status(stack)
    print(f"{status.preemptions} preemptions")
    assert status.preemptions > 0, "the pool was meant to be too small"
    assert status.prefix_cached_tokens > before.prefix_cached_tokens
    for index, (case, one, other) in enumerate(zip(cases, alone, together, strict=True)):
        assert case.params.max_tokens is not None
        expected_length = case.hangs_up_after or case.params.max_tokens
        assert len(one) == min(expected_length, case.params.max_tokens), index
        assert other == one, f"request {index}"
    # And alone means: as one process gives it, on one thread, that has seen nothing before.
    by_itself = [index for index, case in enumerate(cases) if case.params.temperature == 0.0]
    for index in by_itself[::6]:
        one = alone[index]
        assert greedy(tiny_model, shm_prefix, cases[index].prompt, len(one)) == one
