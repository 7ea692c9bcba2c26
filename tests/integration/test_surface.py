"""What any gRPC client finds: health, reflection, and errors with details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    kv_pb2,
    memory_service_pb2,
    memory_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
)

if TYPE_CHECKING:
    from tests.integration.stack import Stack

WRONG_LAYOUT: dict[str, Any] = {
    "kind": kv_pb2.KV_KIND_GQA,
    "num_layers": 2,
    "num_blocks": 10_000,
    "block_tokens": 16,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_slots": 256,
    "hidden_size": 64,
}
SERVICES = {
    "router": {"headwater.v1.RouterService", "vllm.grpc.engine.VllmEngine"},
    "prefill": {"headwater.v1.PrefillService"},
    "decode": {"headwater.v1.DecodeService", "headwater.v1.MemoryService"},
}


@pytest.mark.parametrize("process", SERVICES)
def test_reflection_and_health(shared_stack: Stack, process: str) -> None:
    with grpc.insecure_channel(shared_stack.addresses[process]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICES[process] | {"grpc.health.v1.Health"} <= set(database.get_services())
        for name in SERVICES[process]:
            assert database.FindFileContainingSymbol(name).service
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *SERVICES[process]):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_errors_carry_details(shared_stack: Stack) -> None:
    with grpc.insecure_channel(shared_stack.addresses["router"]) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(router_service_pb2.GenerateRequest(text="")))
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "headwater.v1")
    assert bad_request.field_violations[0].field == "text"


def test_engines_refuse_what_only_a_broken_router_would_send(shared_stack: Stack) -> None:
    """Bad input straight at the engines: a status each, and they go on."""
    with (
        grpc.insecure_channel(shared_stack.addresses["decode"]) as decode,
        grpc.insecure_channel(shared_stack.addresses["prefill"]) as prefill,
    ):
        memory = memory_service_pb2_grpc.MemoryServiceStub(decode)
        generate = decode_service_pb2_grpc.DecodeServiceStub(decode).Generate
        compute = prefill_service_pb2_grpc.PrefillServiceStub(prefill).Prefill
        lease = memory.ReserveKv(
            memory_service_pb2.ReserveKvRequest(prompt_tokens=4, max_new_tokens=4)
        ).lease
        epoch = lease.segment.epoch

        def generation(**fields: object) -> object:
            request = decode_service_pb2.DecodeServiceGenerateRequest(
                lease_id=lease.lease_id, epoch=epoch, prompt_token_ids=[1, 2, 3, 4]
            )
            for name, value in fields.items():
                setattr(request, name, value)
            return list(generate(request))

        def prompt(token_ids: list[int], **changes: object) -> object:
            request = prefill_service_pb2.PrefillRequest(token_ids=token_ids, lease=lease)
            for name, value in changes.items():
                if isinstance(value, kv_pb2.KvLayout):
                    request.lease.layout.CopyFrom(value)
                elif isinstance(value, list):
                    getattr(request.lease, name)[:] = value
                else:
                    setattr(request.lease, name, value)
            return list(compute(request))

        cases = (
            (lambda: generation(), grpc.StatusCode.NOT_FOUND, "its prompt is not computed"),
            (lambda: generation(lease_id=999), grpc.StatusCode.NOT_FOUND, "lease 999"),
            (lambda: generation(epoch=1), grpc.StatusCode.ABORTED, "epoch 1"),
            (lambda: generation(request_id="x" * 129), grpc.StatusCode.INVALID_ARGUMENT, "129"),
            (lambda: prompt([]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
            (lambda: prompt([1] * 17), grpc.StatusCode.INVALID_ARGUMENT, "17"),
            (lambda: prompt([70000]), grpc.StatusCode.INVALID_ARGUMENT, "70000"),
            (lambda: prompt([1], slot=10**6), grpc.StatusCode.INVALID_ARGUMENT, "lease.slot"),
            (
                lambda: prompt([1], layout=kv_pb2.KvLayout(**WRONG_LAYOUT)),
                grpc.StatusCode.INVALID_ARGUMENT,
                "lease.layout",
            ),
            (
                lambda: prompt([1], generation=77),
                grpc.StatusCode.INVALID_ARGUMENT,
                "lease.generation",
            ),
            (
                lambda: prompt([1], block_ids=[lease.block_ids[0] + 1]),
                grpc.StatusCode.INVALID_ARGUMENT,
                "lease.generation",
            ),
            # The number of a lease to come, with the right check sum.
            (
                lambda: prompt([1], generation=lease.generation + (1 << 24)),
                grpc.StatusCode.NOT_FOUND,
                "released",
            ),
            (
                lambda: memory.ReserveKv(memory_service_pb2.ReserveKvRequest(max_new_tokens=1)),
                grpc.StatusCode.INVALID_ARGUMENT,
                "prompt_tokens",
            ),
            (
                lambda: memory.ReserveKv(
                    memory_service_pb2.ReserveKvRequest(prompt_tokens=512, max_new_tokens=1)
                ),
                grpc.StatusCode.INVALID_ARGUMENT,
                "the model's context holds 512",
            ),
            (
                lambda: memory.RenewKv(memory_service_pb2.RenewKvRequest(epoch=3)),
                grpc.StatusCode.ABORTED,
                "epoch 3",
            ),
        )
        for call, code, words in cases:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is code
            assert words in (caught.value.details() or "")
        prompt([1, 2, 3, 4])
        assert generation()
        status = decode_service_pb2_grpc.DecodeServiceStub(decode).GetStatus(
            decode_service_pb2.GetDecodeStatusRequest()
        )
        assert status.kv_leases == 0


def test_a_foreign_segment_is_refused(shared_stack: Stack) -> None:
    """A lease that names a segment which is none of ours."""
    from pathlib import Path

    with (
        grpc.insecure_channel(shared_stack.addresses["decode"]) as decode,
        grpc.insecure_channel(shared_stack.addresses["prefill"]) as prefill,
    ):
        memory = memory_service_pb2_grpc.MemoryServiceStub(decode)
        lease = memory.ReserveKv(
            memory_service_pb2.ReserveKvRequest(prompt_tokens=4, max_new_tokens=4)
        ).lease
        foreign = Path("/dev/shm") / f"{lease.segment.name}-foreign"
        foreign.write_bytes(b"\0" * lease.segment.total_bytes)
        foreign.chmod(0o600)
        try:
            compute = prefill_service_pb2_grpc.PrefillServiceStub(prefill).Prefill
            for name in (foreign.name, f"{foreign.name}-none", "../etc/passwd"):
                request = prefill_service_pb2.PrefillRequest(token_ids=[1, 2], lease=lease)
                request.lease.segment.name = name
                with pytest.raises(grpc.RpcError) as caught:
                    list(compute(request))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "lease.segment" in (caught.value.details() or "")
            request.lease.CopyFrom(lease)
            assert list(compute(request))[-1].HasField("done")
        finally:
            foreign.unlink()
        memory.ReleaseKv(
            memory_service_pb2.ReleaseKvRequest(
                epoch=lease.segment.epoch, lease_ids=[lease.lease_id]
            )
        )
