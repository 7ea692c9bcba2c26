"""Who computes a prompt changes no bit; classes of objectives as a client sees them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from headwater.client import Client
from headwater.errors import InvalidRequestError
from headwater.generation import SamplingParams
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    memory_service_pb2,
    memory_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
)
from tests.integration.reference import greedy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.stack import Stack

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
PROMPTS = [tuple((5 * i + j) % 256 for j in range(n)) for i, n in enumerate((1, 17, 64, 300))]


def status(stack: Stack) -> router_service_pb2.GetRouterStatusResponse:
    with grpc.insecure_channel(stack.addresses["router"]) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        reply: router_service_pb2.GetRouterStatusResponse = stub.GetStatus(
            router_service_pb2.GetRouterStatusRequest()
        )
        return reply


async def answer(stack: Stack, prompt: tuple[int, ...], name: str) -> list[tuple[int, float]]:
    async with Client(stack.addresses["router"]) as client:
        return [
            (token.id, token.logprob or 0.0)
            async for event in client.generate(prompt, PARAMS, objective_class=name)
            for token in event.tokens
        ]


async def test_decode_computes_prompts_as_prefill_does(
    make_stack: Callable[..., Stack],
    tiny_model: Path,
    shm_prefix: str,
) -> None:
    stack = make_stack(
        "router.prompt_path=extend",
        "decode.extend_tokens=16",
        "objectives.classes=fast=60/0.000001, calm=60/60",
        "objectives.default_class=calm",
    )
    stack.start()
    # The strict class makes decode compute the prompts of both in small pieces.
    names = ["", "fast", "calm", "fast"]
    answers = await asyncio.gather(
        *(answer(stack, prompt, name) for prompt, name in zip(PROMPTS, names, strict=True))
    )
    for prompt, got in zip(PROMPTS, answers, strict=True):
        assert got == greedy(tiny_model, shm_prefix, prompt, PARAMS.max_tokens or 0)
    told = status(stack)
    assert (told.extended_requests, told.prefilled_requests) == (len(PROMPTS), 0)
    fast, calm = told.objectives
    assert (fast.name, fast.ttft_objective_seconds) == ("fast", 60.0)
    assert (fast.finished_requests, fast.missed_tpot_requests, fast.attained_requests) == (2, 2, 0)
    assert (calm.finished_requests, calm.attained_requests, calm.shed_requests) == (2, 2, 0)
    async with grpc.aio.insecure_channel(stack.addresses["router"]) as channel:
        await named_by_metadata(router_service_pb2_grpc.RouterServiceStub(channel))
    assert status(stack).objectives[0].finished_requests == 3
    with pytest.raises(InvalidRequestError, match="objective_class: must be one of fast, calm"):
        await answer(stack, PROMPTS[0], "other")
    bad_wishes(stack)


async def named_by_metadata(stub: router_service_pb2_grpc.RouterServiceStub) -> None:
    request = router_service_pb2.GenerateRequest(text="Hi")
    request.sampling.max_tokens = 1
    async for _ in stub.Generate(request, metadata=(("headwater-objective-class", "fast"),)):
        pass


def bad_wishes(stack: Stack) -> None:
    """Decode names the field of a request that only a broken router would send."""
    with grpc.insecure_channel(stack.addresses["decode"]) as channel:
        memory = memory_service_pb2_grpc.MemoryServiceStub(channel)
        decode = decode_service_pb2_grpc.DecodeServiceStub(channel)
        for field, value in (
            ("tpot_objective_seconds", 0.0),
            ("tpot_objective_seconds", float("nan")),
            ("prefilled_tokens", 5),
        ):
            lease = memory.ReserveKv(
                memory_service_pb2.ReserveKvRequest(prompt_tokens=4, max_new_tokens=4)
            ).lease
            request = decode_service_pb2.DecodeServiceGenerateRequest(
                lease_id=lease.lease_id,
                epoch=lease.segment.epoch,
                prompt_token_ids=[1, 2, 3, 4],
                extends_prompt=True,
            )
            setattr(request, field, value)
            with pytest.raises(grpc.RpcError) as caught:
                list(decode.Generate(request))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (caught.value.details() or "")
        assert decode.GetStatus(decode_service_pb2.GetDecodeStatusRequest()).kv_leases == 1
