"""The router over real gRPC, with scripted engines behind it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from headwater.errors import InvalidRequestError, KvExhaustedError, QueueFullError, StaleEpochError
from headwater.rpc.channel import open_channel
from headwater.rpc.server import Server
from headwater.services.router.router import ROUTER_SERVICE, VLLM_SERVICE, Router, build_router
from headwater.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc
from headwater.wire.status import error_from_rpc
from tests.integration.fake_engines import (
    EOS_TOKEN_ID,
    Engine,
    FakeDecode,
    FakePrefill,
    serving_decode,
    serving_prefill,
)

MODEL_DIR = Path(__file__).parents[1] / "data" / "text_model"
ANSWER = " Paris. 😀 Then stop here, and go on."


@dataclass
class Rig:
    """A router on a real port, its engines and its clients."""

    prefill: FakePrefill
    decode: FakeDecode
    prefill_engine: Engine
    decode_engine: Engine
    router: Router
    channel: grpc.aio.Channel
    service: Any
    vllm: Any

    async def ask(self, text: str = "Hello", **fields: Any) -> list[Any]:
        """All responses to a text prompt."""
        request = router_service_pb2.GenerateRequest(text=text, **fields)
        return [response async for response in self.service.Generate(request)]

    async def until_ready(self, is_ready: bool) -> None:
        """Waits until grpc.health says so of the router."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=ROUTER_SERVICE))
        async for reply in call:
            if (reply.status == health_pb2.HealthCheckResponse.SERVING) == is_ready:
                break
        call.cancel()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    prefill, decode = FakePrefill(), FakeDecode()
    async with contextlib.AsyncExitStack() as exits:
        prefill_engine = await exits.enter_async_context(serving_prefill(prefill))
        decode_engine = await exits.enter_async_context(serving_decode(decode))
        router = build_router(
            MODEL_DIR,
            "tiny",
            prefill_engine.address,
            decode_engine.address,
            max_running=2,
            max_waiting=1,
        )
        tokenizer = router.core.model.tokenizer
        decode.script = [*tokenizer.encode(ANSWER, add_special_tokens=False), EOS_TOKEN_ID]
        server = Server("127.0.0.1:0", router.registrations)
        port = await server.start()
        exits.push_async_callback(router.stop)
        exits.push_async_callback(server.stop, 0)
        exits.callback(router.drain)
        router.start()
        reporting = asyncio.create_task(router.report_readiness(server.set_ready))
        exits.callback(reporting.cancel)
        channel = open_channel(f"127.0.0.1:{port}")
        exits.push_async_callback(channel.close)
        rig = Rig(
            prefill,
            decode,
            prefill_engine,
            decode_engine,
            router,
            channel,
            router_service_pb2_grpc.RouterServiceStub(channel),
            vllm_engine_pb2_grpc.VllmEngineStub(channel),
        )
        await rig.until_ready(True)
        yield rig


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


def _vllm_request(**fields: Any) -> Any:
    return vllm_engine_pb2.GenerateRequest(
        request_id="mine",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7]),
        **fields,
    )


async def test_vllm_stream_and_whole(rig: Rig) -> None:
    whole = [reply async for reply in rig.vllm.Generate(_vllm_request())]
    assert [reply.WhichOneof("response") for reply in whole] == ["complete"]
    complete = whole[0].complete
    assert list(complete.output_ids) == rig.decode.script
    assert complete.finish_reason == "stop"
    assert complete.matched_token_id == EOS_TOKEN_ID
    assert (complete.prompt_tokens, complete.cached_tokens) == (3, 1)
    streamed = [reply async for reply in rig.vllm.Generate(_vllm_request(stream=True))]
    chunks = [reply.chunk for reply in streamed if reply.HasField("chunk")]
    assert [i for chunk in chunks for i in chunk.token_ids] == rig.decode.script
    assert [chunk.completion_tokens for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert streamed[-1].complete == complete


async def test_vllm_text_and_zero_scalars_mean_the_defaults(rig: Rig) -> None:
    request = vllm_engine_pb2.GenerateRequest(request_id="mine", text="The capital of France is")
    replies = [reply async for reply in rig.vllm.Generate(request)]
    assert replies[-1].complete.prompt_tokens == 5
    sampling = rig.decode.requests[0].sampling
    assert (sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 0, 1.0)
    assert sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 17}, "n: must be between 1 and 16"),
        ({"structural_tag": "{}"}, "sampling_params.structural_tag: structural tags"),
        ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "sampling_params.truncate_prompt_tokens"),
        ({"logprobs": -1}, "sampling_params.logprobs: must be between 0 and 20"),
        ({"top_p": 1.5}, "sampling_params.top_p: must be in"),
        ({"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias: token id -1"),
    ],
)
async def test_vllm_refuses_what_is_not_offered(
    rig: Rig, sampling: dict[str, Any], message: str
) -> None:
    request = _vllm_request(sampling_params=vllm_engine_pb2.SamplingParams(**sampling))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in rig.vllm.Generate(request):
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(caught.value.details())


async def test_vllm_abort(rig: Rig) -> None:
    rig.decode.permits = asyncio.Semaphore(0)
    call = rig.vllm.Generate(_vllm_request())
    await rig.decode.started.wait()
    await rig.vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine", "unknown"]))
    replies = [reply async for reply in call]
    assert replies[-1].complete.finish_reason == "abort"
    assert list(replies[-1].complete.output_ids) == rig.decode.script[:2]
    await rig.decode.freed.wait()


async def test_vllm_tokenizer_archive(rig: Rig) -> None:
    chunks = [chunk async for chunk in rig.vllm.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert all(not chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        for name in archive.namelist():
            assert archive.read(name) == (MODEL_DIR / name).read_bytes()


async def test_vllm_information(rig: Rig) -> None:
    health = await rig.vllm.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert health.healthy
    model = await rig.vllm.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length) == ("tiny", 512)
    assert (model.bos_token_id, model.pad_token_id) == (1, -1)
    server = await rig.vllm.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (server.server_type, server.max_num_seqs) == ("vllm-grpc", 2)
    loads = await rig.vllm.GetLoads(vllm_engine_pb2.GetLoadsRequest())
    assert loads.loads[0].max_total_num_tokens == 1024
    assert loads.loads[0].token_usage == 0
    await rig.prefill_engine.server.stop(0)
    await rig.until_ready(False)
    health = await rig.vllm.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert not health.healthy
    assert health.message == f"prefill at {rig.prefill_engine.address} is not serving"


async def test_vllm_kv_events_answer_at_once_and_stay_open(rig: Rig) -> None:
    call = rig.vllm.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    await call.initial_metadata()
    assert not call.done()
    rig.router.drain()
    assert [event async for event in call] == []
    assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_vllm_rest_is_unimplemented_with_a_sentence(
    rig: Rig, method: str, request_message: Any
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(rig.vllm, method)(request_message)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert str(caught.value.details()).startswith(f"{method}: ")


def test_vllm_service_name_is_the_protocol_s() -> None:
    (service,) = vllm_engine_pb2.DESCRIPTOR.services_by_name.values()
    assert service.full_name == VLLM_SERVICE
