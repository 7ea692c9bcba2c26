"""The router's side of vLLM's engine protocol over real gRPC, with scripted engines behind it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from headwater.services.router.router import VLLM_SERVICE
from tests.integration.fake_engines import (
    EOS_TOKEN_ID,
)
from tests.integration.router_rig import MODEL_DIR, Rig


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
