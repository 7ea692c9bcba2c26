"""What the router tells of decode's prefix cache when decode is lost and takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from headwater.rpc.interceptor import Context
from headwater.rpc.link import PLAIN
from headwater.services.router.prefix_cache import PrefixCache
from headwater.v1 import memory_service_pb2 as pb
from headwater.v1 import memory_service_pb2_grpc


class _Decode(memory_service_pb2_grpc.MemoryServiceServicer):
    """Is lost after each snapshot, and then refuses twice, as one that is not ready does."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        self.num_calls += 1
        if self.num_calls % 3 == 1:
            yield pb.WatchKvEventsResponse(epoch=1, block_tokens=16, is_snapshot=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not ready")


async def test_a_loss_is_told_once_however_often_decode_refuses() -> None:
    server, decode = grpc.aio.server(), _Decode()
    port = server.add_insecure_port("127.0.0.1:0")
    memory_service_pb2_grpc.add_MemoryServiceServicer_to_server(decode, server)
    await server.start()
    try:
        calls = []
        async with (
            asyncio.timeout(30),
            aclosing(PrefixCache(f"127.0.0.1:{port}", PLAIN).follow()) as batches,
        ):
            async for block_tokens, batch in batches:
                assert (block_tokens, batch.is_snapshot, batch.events) == (16, True, ())
                calls.append(decode.num_calls)
                if len(calls) == 5:
                    break
        # A snapshot and its loss, nothing of two refusals, and so on.
        assert calls == [1, 1, 4, 4, 7]
    finally:
        await server.stop(None)
