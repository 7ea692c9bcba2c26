"""A router over real gRPC, with scripted engines behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from headwater.rpc.channel import open_channel
from headwater.rpc.server import Server
from headwater.services.router.router import ROUTER_SERVICE, Router, build_router
from headwater.v1 import router_service_pb2, router_service_pb2_grpc
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


async def start_router(router: Router, server: Server, exits: contextlib.AsyncExitStack) -> int:
    """Starts both, and gives the server's port; at the exits they end as they do in production."""
    port = await server.start()
    exits.push_async_callback(router.stop)
    exits.push_async_callback(server.stop, 0)
    exits.callback(router.drain)
    router.start()
    return port


@contextlib.asynccontextmanager
async def running_rig() -> AsyncIterator[Rig]:
    """One that is ready; it ends with the context."""
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
        port = await start_router(router, server, exits)
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
