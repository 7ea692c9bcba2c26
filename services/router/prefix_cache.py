"""Decode's prefix cache as gateways want to know it: what it holds, and emptying it.

Has connections of its own, so that following the cache outlives any loss of decode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from headwater.kv.feed import KvEventBatch
from headwater.rpc.channel import open_channel
from headwater.rpc.streams import received
from headwater.v1 import memory_service_pb2 as pb
from headwater.v1 import memory_service_pb2_grpc
from headwater.wire.kv import kv_events_from_pb
from headwater.wire.status import error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from headwater.rpc.link import Link

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
_POLL_SECONDS = 0.05
_CONTROL_SECONDS = 10.0


class PrefixCache:
    """The prefix cache of the decode process at `address`."""

    def __init__(self, address: str, link: Link) -> None:
        self._address = address
        self._link = link

    async def follow(self) -> AsyncGenerator[tuple[int, KvEventBatch], None]:
        """Yields tokens per block, and events, for ever; a lost process leaves an empty cache.

        The first batch, and the first one after each loss, is a snapshot.
        """
        block_tokens = 0
        async with open_channel(self._address, self._link) as channel:
            service = memory_service_pb2_grpc.MemoryServiceStub(channel)
            while True:
                call = service.WatchKvEvents(pb.WatchKvEventsRequest(), wait_for_ready=True)
                try:
                    async with aclosing(received(call)) as messages:
                        async for message in messages:
                            block_tokens = message.block_tokens
                            yield block_tokens, kv_events_from_pb(message)
                except grpc.aio.AioRpcError as failure:
                    logger.info("the prefix cache cannot be followed: %s", failure.details())
                if block_tokens:
                    yield block_tokens, KvEventBatch(True, ())
                    # Told once: a process that starts refuses until it is ready.
                    block_tokens = 0
                await asyncio.sleep(_RETRY_SECONDS)

    async def flush(self, patience_seconds: float) -> tuple[int, int]:
        """Forgets what no request holds, until nothing is left or the patience is at its end.

        Returns how many blocks were forgotten, and how many requests still hold. Raises
        HeadwaterError when decode does not answer.
        """
        give_up = time.monotonic() + patience_seconds
        num_flushed = 0
        async with open_channel(self._address, self._link) as channel:
            service = memory_service_pb2_grpc.MemoryServiceStub(channel)
            while True:
                try:
                    reply = await service.FlushKv(pb.FlushKvRequest(), timeout=_CONTROL_SECONDS)
                except grpc.aio.AioRpcError as failure:
                    raise error_from_rpc(failure) from failure
                num_flushed += reply.flushed_blocks
                if not reply.remaining_blocks or time.monotonic() >= give_up:
                    return num_flushed, reply.remaining_blocks
                await asyncio.sleep(_POLL_SECONDS)
