"""A router that answers with the prompt, behind our own server, for tests of the way to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from headwater.client import Client
from headwater.rpc.link import PLAIN, Link
from headwater.rpc.server import Registration, Server
from headwater.rpc.tls import Kind
from headwater.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc


class Echo(router_service_pb2_grpc.RouterServiceServicer):
    """Holds its answers back while `go_on` is cleared."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_called = 0

    async def Generate(
        self, request: router_service_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_service_pb2.GenerateResponse]:
        self.num_called += 1
        await self.go_on.wait()
        yield router_service_pb2.GenerateResponse(
            text=request.text[:1000], finish_reason=generation_pb2.FINISH_REASON_STOP
        )


@contextlib.asynccontextmanager
async def echoing(
    link: Link = PLAIN, kind: Kind = "router", echo: Echo | None = None
) -> AsyncIterator[str]:
    """The address of a server with it."""
    registration = Registration(
        router_service_pb2_grpc.add_RouterServiceServicer_to_server,
        echo or Echo(),
        "headwater.v1.RouterService",
    )
    server = Server("127.0.0.1:0", (registration,), link, kind)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def answer(address: str, link: Link = PLAIN, prompt: str = "hello") -> str:
    """What our client gets there. Raises the HeadwaterError that it gets instead."""
    async with Client(address, link) as client:
        return "".join([event.text async for event in client.generate(prompt)])
