"""The router's own service over real gRPC, with scripted engines behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from headwater.errors import InvalidRequestError, KvExhaustedError, QueueFullError, StaleEpochError
from headwater.services.router.router import ROUTER_SERVICE
from headwater.v1 import generation_pb2, router_service_pb2
from headwater.wire.status import error_from_rpc
from tests.integration.fake_engines import (
    EOS_TOKEN_ID,
    serving_decode,
)
from tests.integration.router_rig import ANSWER, Rig


async def test_text_prompt(rig: Rig) -> None:
    responses = await rig.ask("The capital of France is", request_id="mine")
    assert "".join(response.text for response in responses) == ANSWER
    assert {response.request_id for response in responses} == {"mine"}
    assert [r.prefill_progress for r in responses[:4]] == [0.25, 0.5, 0.75, 1.0]
    last = responses[-1]
    assert last.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert last.usage.completion_tokens == len(rig.decode.script)
    assert last.usage.cached_tokens == 1
    assert last.timings.total_seconds >= last.timings.time_to_first_token_seconds > 0
    (prefilled,) = rig.prefill.requests
    (generated,) = rig.decode.requests
    assert prefilled.request_id == generated.request_id == "mine"
    assert prefilled.lease.lease_id == generated.lease_id
    assert generated.epoch == rig.decode.epoch
    assert list(prefilled.token_ids) == list(generated.prompt_token_ids)


async def test_chat_and_token_prompts(rig: Rig) -> None:
    chat = router_service_pb2.ChatMessages(
        messages=[router_service_pb2.ChatMessage(role="user", content="Hello")]
    )
    requests = [
        router_service_pb2.GenerateRequest(chat=chat),
        router_service_pb2.GenerateRequest(token_ids=router_service_pb2.TokenIds(ids=[5, 6])),
    ]
    for request in requests:
        responses = [response async for response in rig.service.Generate(request)]
        assert "".join(response.text for response in responses) == ANSWER
        assert responses[0].request_id
    assert list(rig.decode.requests[1].prompt_token_ids) == [5, 6]


async def test_log_probabilities(rig: Rig) -> None:
    responses = await rig.ask(
        sampling=generation_pb2.SamplingParams(logprobs=2, max_tokens=1, temperature=0.5)
    )
    (token,) = responses[-1].tokens
    assert token.logprob == -0.5
    assert [top.logprob for top in token.top_logprobs] == [-0.5, -1.5]
    assert responses[-1].finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert rig.decode.requests[0].sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt: one of text, chat and token_ids must be given"),
        ({"text": ""}, "text: must not be empty"),
        ({"text": "x", "request_id": "x" * 129}, "request_id: at most 128 characters"),
        (
            {"text": "x", "sampling": generation_pb2.SamplingParams(temperature=float("nan"))},
            "sampling.temperature: must be in",
        ),
        (
            {"text": "x", "sampling": generation_pb2.SamplingParams(max_tokens=512)},
            "sampling.max_tokens: 1 prompt tokens and 512 new ones exceed",
        ),
    ],
)
async def test_bad_requests_are_named_and_harm_nobody(
    rig: Rig, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in rig.service.Generate(router_service_pb2.GenerateRequest(**fields)):
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(caught.value.details())
    assert isinstance(error_from_rpc(caught.value), InvalidRequestError)
    assert "".join(response.text for response in await rig.ask()) == ANSWER


async def test_text_that_is_not_utf8_harms_nobody(rig: Rig) -> None:
    send: Any = rig.channel.unary_stream(f"/{ROUTER_SERVICE}/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in send(b"\x12\x01\xff"):  # field 2, one byte
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in str(caught.value.details())
    assert isinstance(error_from_rpc(caught.value), InvalidRequestError)
    assert "".join(response.text for response in await rig.ask()) == ANSWER


async def test_full_pool_is_waited_for_and_what_never_fits_is_refused(rig: Rig) -> None:
    rig.decode.reserve_errors = [KvExhaustedError("the pool is full", 1)] * 3
    assert "".join(response.text for response in await rig.ask()) == ANSWER
    rig.decode.reserve_errors = [InvalidRequestError("max_new_tokens", "the pool holds 64")]
    with pytest.raises(grpc.aio.AioRpcError, match="the pool holds 64") as caught:
        await rig.ask()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_full_queue_says_when_to_come_back(rig: Rig) -> None:
    rig.prefill.gate.clear()
    asking = [asyncio.create_task(rig.ask()) for _ in range(3)]
    while rig.router.core.admission.num_running + rig.router.core.admission.num_waiting < 3:
        await asyncio.sleep(0.001)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.ask()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_from_rpc(caught.value)
    assert isinstance(error, QueueFullError)
    assert error.retry_after_ms > 0
    rig.prefill.gate.set()
    await asyncio.gather(*asking)


async def test_deadline_is_honoured_in_every_stage(rig: Rig) -> None:
    rig.decode.permits = asyncio.Semaphore(0)
    request = router_service_pb2.GenerateRequest(text="Hello")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in rig.service.Generate(request, timeout=0.2):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.decode.cancelled.wait()
    await rig.decode.freed.wait()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_cancellation_reaches_the_engine_and_frees_the_lease(rig: Rig, stage: str) -> None:
    engine = rig.prefill if stage == "prefill" else rig.decode
    rig.prefill.gate.clear() if stage == "prefill" else None
    rig.decode.permits = asyncio.Semaphore(0)
    call = rig.service.Generate(router_service_pb2.GenerateRequest(text="Hello"))
    await call.read()
    await engine.started.wait()
    call.cancel()
    await engine.cancelled.wait()
    await rig.decode.freed.wait()


async def test_lease_is_renewed_during_a_long_prefill(rig: Rig) -> None:
    rig.decode.ttl_ms = 30
    rig.prefill.gate.clear()
    asking = asyncio.create_task(rig.ask())
    for _ in range(2):
        await rig.decode.renewed.wait()
        rig.decode.renewed.clear()
    rig.prefill.gate.set()
    assert "".join(response.text for response in await asking) == ANSWER


async def test_engine_that_dies_is_named_and_found_again(rig: Rig) -> None:
    rig.decode.permits = asyncio.Semaphore(0)
    asking = asyncio.create_task(rig.ask())
    await rig.decode.started.wait()
    address = rig.decode_engine.address
    await rig.decode_engine.server.stop(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asking
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    message = str(caught.value.details())
    assert f"decode at {address} went away while generating" in message
    assert "the request was not completed; retry" in message
    await rig.until_ready(False)
    with pytest.raises(grpc.aio.AioRpcError, match=f"decode at {address} is not serving"):
        await rig.ask()
    rig.decode.permits = asyncio.Semaphore(10_000)
    async with serving_decode(rig.decode, int(address.rpartition(":")[2])):
        await rig.until_ready(True)
        assert "".join(response.text for response in await rig.ask()) == ANSWER


async def test_lost_lease_asks_to_retry(rig: Rig) -> None:
    rig.decode.generate_error = StaleEpochError("epoch 7 is over")
    with pytest.raises(grpc.aio.AioRpcError, match="lost the request's KV lease") as caught:
        await rig.ask()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_model_and_status(rig: Rig) -> None:
    await rig.ask()
    model = await rig.service.GetModel(router_service_pb2.GetModelRequest())
    assert model.model_name == "tiny"
    assert model.max_context_tokens == 512
    assert model.vocab_size == 384
    assert list(model.eos_token_ids) == [EOS_TOKEN_ID]
    assert model.has_chat_template
    status = await rig.service.GetStatus(router_service_pb2.GetRouterStatusRequest())
    assert status.finished_requests == 1
    assert status.generated_tokens == len(rig.decode.script)
    assert status.tokens_per_second > 0
    assert [(e.name, e.address, e.is_serving) for e in status.engines] == [
        ("prefill", rig.prefill_engine.address, True),
        ("decode", rig.decode_engine.address, True),
    ]
