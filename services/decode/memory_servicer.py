"""MemoryService: hands out weights and KV leases. Only translates."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headwater.errors import InvalidRequestError, PromptTooLongError
from headwater.generation import check_request_id
from headwater.kv.feed import KvEventFeed
from headwater.v1 import memory_service_pb2 as pb
from headwater.v1 import memory_service_pb2_grpc, weights_pb2
from headwater.wire.kv import kv_events_to_pb, kv_lease_to_pb, segment_handle_to_pb
from headwater.wire.weights import tensor_batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headwater.rpc.interceptor import Context
    from headwater.services.decode.owner import MemoryOwner


class MemoryServicer(memory_service_pb2_grpc.MemoryServiceServicer):
    """Serves MemoryService from the owner of the shared memory."""

    def __init__(self, owner: MemoryOwner) -> None:
        self._owner = owner

    async def GetWeights(
        self, request: pb.GetWeightsRequest, context: Context
    ) -> AsyncIterator[pb.GetWeightsResponse]:
        """Progress while loading, then the manifest."""
        async for loaded_bytes, total_bytes in self._owner.follow_loading():
            progress = weights_pb2.LoadProgress(loaded_bytes=loaded_bytes, total_bytes=total_bytes)
            yield pb.GetWeightsResponse(progress=progress)
        weights = self._owner.ready().weights
        yield pb.GetWeightsResponse(
            manifest=weights_pb2.WeightsManifest(
                segment=segment_handle_to_pb(weights.handle),
                config_json=weights.config_json,
                model_name=self._owner.model_name,
                num_tensors=len(weights.entries),
            )
        )
        for batch in tensor_batches(tuple(weights.entries.values())):
            yield pb.GetWeightsResponse(tensors=batch)

    async def ReserveKv(
        self, request: pb.ReserveKvRequest, context: Context
    ) -> pb.ReserveKvResponse:
        """Leases blocks."""
        check_request_id(request.request_id)
        for name in ("prompt_tokens", "max_new_tokens"):
            if getattr(request, name) < 1:
                raise InvalidRequestError(name, "must be at least 1, got 0")
        memory = self._owner.ready()
        num_tokens = request.prompt_tokens + request.max_new_tokens
        if num_tokens > memory.spec.max_context_tokens:
            raise PromptTooLongError(
                "prompt_tokens",
                f"{request.prompt_tokens} prompt tokens and {request.max_new_tokens} new ones are "
                f"{num_tokens}, the model's context holds {memory.spec.max_context_tokens}",
            )
        lease = memory.pool.reserve(
            request.request_id, request.prompt_tokens, request.max_new_tokens, request.block_hashes
        )
        return pb.ReserveKvResponse(lease=kv_lease_to_pb(lease))

    async def RenewKv(self, request: pb.RenewKvRequest, context: Context) -> pb.RenewKvResponse:
        """Extends leases."""
        expired = self._owner.ready().pool.renew(request.epoch, request.lease_ids)
        return pb.RenewKvResponse(expired_lease_ids=expired)

    async def ForkKv(self, request: pb.ForkKvRequest, context: Context) -> pb.ForkKvResponse:
        """Leases a prompt again."""
        lease = self._owner.fork(request.epoch, request.lease_id, request.prompt_tokens)
        return pb.ForkKvResponse(lease=kv_lease_to_pb(lease))

    async def ReleaseKv(
        self, request: pb.ReleaseKvRequest, context: Context
    ) -> pb.ReleaseKvResponse:
        """Ends leases."""
        self._owner.ready().pool.release(request.epoch, request.lease_ids)
        return pb.ReleaseKvResponse()

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """What the prefix cache holds, and each change of it, until the process ends."""
        pool = self._owner.ready().pool
        await context.send_initial_metadata(())
        draining = asyncio.create_task(self._owner.draining.wait())
        try:
            with KvEventFeed(pool) as feed:
                while not draining.done():
                    coming = asyncio.create_task(feed.next())
                    try:
                        await asyncio.wait((coming, draining), return_when=asyncio.FIRST_COMPLETED)
                        if coming.done():
                            yield kv_events_to_pb(
                                coming.result(), pool.epoch, pool.layout.block_tokens
                            )
                    finally:
                        coming.cancel()
        finally:
            draining.cancel()

    async def FlushKv(self, request: pb.FlushKvRequest, context: Context) -> pb.FlushKvResponse:
        """Empties the prefix cache."""
        flushed, remaining = self._owner.ready().pool.flush()
        return pb.FlushKvResponse(flushed_blocks=flushed, remaining_blocks=remaining)
