"""Limits over real sockets: whoever exceeds one hears which, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from headwater.config import LimitsConfig
from headwater.errors import InvalidRequestError, ResourceError
from headwater.rpc.link import Link
from headwater.v1 import router_service_pb2 as pb
from headwater.v1 import router_service_pb2_grpc
from tests.integration.echo import Echo, answer, echoing

MIB = 1024 * 1024


def limits(**values: Any) -> Link:
    return Link(limits=LimitsConfig(**values))


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_a_message_that_is_too_large_is_named() -> None:
    async with echoing(limits(message_bytes=MIB)) as address:
        with pytest.raises(
            InvalidRequestError,
            match=r"request: has \d+ bytes, and limits\.message_bytes allows 1048576; send less",
        ):
            await answer(address, prompt="x" * (MIB + 1))
        assert await answer(address) == "hello"


async def test_a_message_that_is_far_too_large_is_not_even_read() -> None:
    async with (
        echoing(limits(message_bytes=MIB)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        code, details = await code_of(stub.Generate(pb.GenerateRequest(text="x" * 8 * MIB)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in details
        assert await answer(address) == "hello"


async def test_our_own_client_sends_no_message_that_is_too_large() -> None:
    async with echoing() as address:
        link = limits(message_bytes=MIB)
        with pytest.raises(InvalidRequestError, match=r"larger than max.*limits\.message_bytes"):
            await answer(address, link, "x" * (2 * MIB))


async def test_too_many_calls_are_refused_and_health_is_not() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    echo = Echo()
    echo.go_on.clear()
    async with echoing(limits(concurrent_calls=2), echo=echo) as address:
        running = [asyncio.create_task(answer(address)) for _ in range(2)]
        await until(lambda: echo.num_called == 2)
        with pytest.raises(ResourceError, match=r"limits\.concurrent_calls allows no more"):
            await answer(address)
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        echo.go_on.set()
        assert await asyncio.gather(*running) == ["hello", "hello"]
        assert await answer(address) == "hello"


async def test_a_connection_carries_so_many_calls_at_once() -> None:
    echo = Echo()
    echo.go_on.clear()
    async with (
        echoing(limits(streams_per_connection=2), echo=echo) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = router_service_pb2_grpc.RouterServiceStub(channel)

        async def one() -> None:
            async for _ in stub.Generate(pb.GenerateRequest(text="x")):
                pass

        running = [asyncio.create_task(one()) for _ in range(3)]
        await until(lambda: echo.num_called >= 2)
        # On another connection there is room.
        other = asyncio.create_task(answer(address))
        await until(lambda: echo.num_called >= 3)
        assert echo.num_called == 3
        echo.go_on.set()
        await asyncio.gather(*running, other)
        assert echo.num_called == 4


async def test_headers_that_are_too_large_are_refused() -> None:
    async with (
        echoing(limits(metadata_bytes=4096)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        request = pb.GenerateRequest(text="x")
        async for _ in stub.Generate(request, metadata=(("x-note", "y" * 2000),)):
            pass
        code, details = await code_of(stub.Generate(request, metadata=(("x-note", "y" * 8000),)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "metadata" in details
        assert await answer(address) == "hello"


async def test_whoever_pings_too_often_is_disconnected() -> None:
    echo = Echo()
    echo.go_on.clear()
    options = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with (
        echoing(limits(min_ping_seconds=14.0), echo=echo) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        code, details = await code_of(stub.Generate(pb.GenerateRequest(text="x")))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "too_many_pings" in details or "Too many pings" in details
        echo.go_on.set()
        assert await answer(address) == "hello"


async def until(is_so: Callable[[], bool]) -> None:
    """There is nothing to wait on: what happens is on the other side of a socket."""
    async with asyncio.timeout(30):
        while not is_so():
            with contextlib.suppress(TimeoutError):
                await asyncio.sleep(0.01)
