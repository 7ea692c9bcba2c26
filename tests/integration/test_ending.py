"""What a call that is refused leaves behind: nothing, and at once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.errors import InvalidRequestError, NotOfferedError
from headwater.v1 import router_service_pb2 as pb
from tests.integration.echo import Echo, echoing

SERVICE = "/headwater.v1.RouterService"
REFUSED = {
    "stream": (f"{SERVICE}/Generate", pb.GenerateRequest(text="x").SerializeToString()),
    "unary": (f"{SERVICE}/GetStatus", b""),
    "not a message": (f"{SERVICE}/Generate", b"\xff"),
    "health": ("/grpc.health.v1.Health/Check", b"\xff"),
}
SECONDS = 30


class Refusing(Echo):
    """Refuses whatever it is asked."""

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        raise InvalidRequestError("text", "is refused")
        yield pb.GenerateResponse()

    async def GetStatus(self, request: Any, context: Any) -> Any:
        raise NotOfferedError("no status")


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refused_call_is_in_no_circle(kind: str) -> None:
    path, data = REFUSED[kind]
    async with (
        echoing(echo=Refusing()) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        method: Any = channel.stream_stream(path)
        call = method(iter([data]), timeout=SECONDS)
        assert await call.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNIMPLEMENTED,
        )
        # The server's loop holds the last call until another comes.
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while kept():
                await asyncio.sleep(0.01)


def kept() -> list[object]:
    """Errors of calls that gRPC has aborted."""
    return [each for each in gc.get_objects() if type(each) is grpc.aio.AbortError]
