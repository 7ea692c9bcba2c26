"""SIGTERM to a process with work: it says so, takes no more, finishes what it has, and exits 0."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.client import Client
from headwater.errors import UnavailableError
from headwater.generation import FinishReason, SamplingParams, TextEvent
from headwater.v1 import (
    memory_service_pb2,
    memory_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
)
from tests.integration.stack import SERVICES

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from tests.integration.stack import Stack

NUM_TOKENS = 400
LONG = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Far longer than a test may take: who waits for all of it, does not end when its work is done.
GRACE = 3000.0
EXIT_SECONDS = 60.0


async def wait_for_not_serving(address: str, name: str) -> None:
    """Returns once the process says so, or is gone."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICES[name])
        )
        async for reply in call:
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                return


async def ends(stack: Stack, name: str) -> int:
    """The exit status of a process that was told to stop."""
    process = stack.processes.pop(name)
    return await asyncio.to_thread(process.wait, EXIT_SECONDS)


async def refused(address: str) -> None:
    """A new request, on a new connection, gets UNAVAILABLE."""
    async with Client(address) as client:
        with pytest.raises(UnavailableError):
            await drain(client.generate("too late", LONG))


@pytest.mark.parametrize("name", ["router", "decode"])
async def test_what_runs_is_finished_and_what_comes_is_refused(
    make_stack: Callable[..., Stack], name: str
) -> None:
    stack = make_stack(f"{name}.grace_seconds={GRACE}", "router.recovery_seconds=0")
    stack.start()
    address = stack.addresses["router"]
    events: list[TextEvent] = []
    async with Client(address) as client, aclosing(client.generate("go on", LONG)) as stream:
        async for event in stream:
            events.append(event)
            if sum(len(e.tokens) for e in events) == 2:
                stack.processes[name].send_signal(signal.SIGTERM)
                # The router passes on that decode is not there for new requests.
                await wait_for_not_serving(stack.addresses[name], name)
                await wait_for_not_serving(address, "router")
                await refused(address)
    assert sum(len(e.tokens) for e in events) == NUM_TOKENS
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert await ends(stack, name) == 0
    assert "Traceback" not in stack.log(name)


class PrefillRig:
    """Prompts straight at prefill, computed one token at a time."""

    def __init__(self, decode: grpc.aio.Channel, prefill: grpc.aio.Channel) -> None:
        self.memory = memory_service_pb2_grpc.MemoryServiceStub(decode)
        self.service = prefill_service_pb2_grpc.PrefillServiceStub(prefill)

    async def request(self) -> prefill_service_pb2.PrefillRequest:
        reply = await self.memory.ReserveKv(
            memory_service_pb2.ReserveKvRequest(prompt_tokens=NUM_TOKENS, max_new_tokens=1)
        )
        return prefill_service_pb2.PrefillRequest(token_ids=[5] * NUM_TOKENS, lease=reply.lease)

    async def idle(self) -> prefill_service_pb2.GetPrefillStatusResponse:
        """The status, once nothing is computed any more."""
        while True:
            status: prefill_service_pb2.GetPrefillStatusResponse = await self.service.GetStatus(
                prefill_service_pb2.GetPrefillStatusRequest()
            )
            if not status.running_requests and not status.waiting_requests:
                return status


async def test_prefill_stops_what_nobody_waits_for_and_finishes_the_rest(
    make_stack: Callable[..., Stack],
) -> None:
    """A deadline and a cancellation are honoured between layers; SIGTERM lets a prompt end."""
    stack = make_stack(f"prefill.grace_seconds={GRACE}", "prefill.chunk_tokens=1")
    stack.start()
    async with (
        grpc.aio.insecure_channel(stack.addresses["decode"]) as decode,
        grpc.aio.insecure_channel(stack.addresses["prefill"]) as prefill,
    ):
        rig = PrefillRig(decode, prefill)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(rig.service.Prefill(await rig.request(), timeout=0.02))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = rig.service.Prefill(await rig.request())
        assert (await call.read()).HasField("progress")
        call.cancel()
        status = await rig.idle()
        assert status.prompt_tokens < 2 * NUM_TOKENS
        assert status.pending_tokens == 0
        request = await rig.request()
        call = rig.service.Prefill(request)
        assert (await call.read()).HasField("progress")
        stack.processes["prefill"].send_signal(signal.SIGTERM)
        await wait_for_not_serving(stack.addresses["prefill"], "prefill")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(rig.service.Prefill(request))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        while (reply := await call.read()).HasField("progress"):
            pass
        assert reply.done.computed_tokens == NUM_TOKENS
    assert await ends(stack, "prefill") == 0


async def drain(call: AsyncIterable[object]) -> None:
    async for _ in call:
        pass


async def test_the_grace_period_ends(make_stack: Callable[..., Stack]) -> None:
    """A request that cannot end in time is told so; the process goes anyway."""
    stack = make_stack("router.grace_seconds=0.5")
    stack.start()
    decode = stack.processes["decode"]
    try:
        async with Client(stack.addresses["router"]) as client:
            stream = client.generate("never ends", LONG)
            while not (await anext(stream)).tokens:
                pass
            decode.send_signal(signal.SIGSTOP)
            stack.processes["router"].send_signal(signal.SIGTERM)
            with pytest.raises(UnavailableError):
                await drain(stream)
    finally:
        decode.send_signal(signal.SIGCONT)
    assert await ends(stack, "router") == 0
