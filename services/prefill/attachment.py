"""What prefill attaches: the model's weights once, and the KV pool of the current epoch.

Lives in the event loop of the prefill process. decode is the owner of both; when it has come back
with a new pool, the weights are looked up again, for it may serve another checkpoint now.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from headwater.errors import InternalError, InvalidRequestError, SegmentError, StaleEpochError
from headwater.kv.writer import KvWriter
from headwater.model.spec import ModelSpec
from headwater.rpc.channel import open_channel
from headwater.rpc.streams import received
from headwater.telemetry.tracing import outgoing_metadata
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    memory_service_pb2,
    memory_service_pb2_grpc,
)
from headwater.weights.store import WeightsStore
from headwater.wire.kv import kv_layout_from_pb, segment_handle_from_pb
from headwater.wire.status import error_from_rpc
from headwater.wire.weights import tensor_entry_from_pb

if TYPE_CHECKING:
    from headwater.kv.lease import KvLease
    from headwater.model.interface import Model
    from headwater.rpc.link import Link
    from headwater.services.prefill.models import PromptModels
    from headwater.v1 import weights_pb2

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.25


class Attachment:
    """The attached model and pool."""

    def __init__(self, decode_address: str, models: PromptModels, link: Link) -> None:
        self._models = models
        self._channel = open_channel(decode_address, link)
        self._memory_service = memory_service_pb2_grpc.MemoryServiceStub(self._channel)
        self._decode_service = decode_service_pb2_grpc.DecodeServiceStub(self._channel)
        self._lock = asyncio.Lock()
        self._writer: KvWriter | None = None
        self.store: WeightsStore | None = None
        self.model: Model | None = None
        self.model_name = ""
        self.vocab_size = 0

    async def attach_weights(self) -> None:
        """Waits for decode to load the weights, however long, and attaches them."""
        while True:
            try:
                await self._fetch_weights()
                return
            except grpc.aio.AioRpcError as failure:
                logger.info("waiting for decode: %s", failure.details())
            except SegmentError as error:
                # decode may have replaced the segment between its answer and our attaching.
                logger.warning("the weights cannot be attached yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    async def writer_for(self, lease: KvLease) -> tuple[Model, KvWriter]:
        """The model and the pool that the lease belongs to.

        What is attached is what decode says, and never what a lease says: a wrong one must not take
        the pool away from the prompts under way.

        Raises StaleEpochError when decode has another pool, SegmentError when the pool cannot be
        attached, UnavailableError when decode is away, InvalidRequestError when the lease names
        another segment or layout than the pool's.
        """
        async with self._lock:
            if self._writer is None or self._writer.handle.epoch != lease.segment.epoch:
                await self._attach_pool(lease.segment.epoch)
            assert self._writer is not None
            assert self.model is not None
            if self._writer.handle != lease.segment:
                raise InvalidRequestError(
                    "lease.segment", "is not the pool's; pass the lease on as ReserveKv gave it"
                )
            if self._writer.memory.layout != lease.layout:
                raise InvalidRequestError("lease.layout", "is not the layout of the lease's pool")
            return self.model, self._writer

    async def decode_status(
        self, seconds: float | None = None
    ) -> decode_service_pb2.GetDecodeStatusResponse:
        """What decode says of itself. Raises AioRpcError when it does not, or takes longer."""
        status: decode_service_pb2.GetDecodeStatusResponse = await self._decode_service.GetStatus(
            decode_service_pb2.GetDecodeStatusRequest(),
            metadata=outgoing_metadata(),
            timeout=seconds,
        )
        return status

    async def close(self) -> None:
        """Detaches all."""
        await self._channel.close()
        self._models.close()
        if self._writer is not None:
            self._writer.close()
        if self.store is not None:
            self.store.close()

    async def _attach_pool(self, epoch: int) -> None:
        try:
            status = await self.decode_status()
            if status.kv_pool.epoch != epoch:
                raise StaleEpochError(
                    f"epoch {epoch}: the KV pool is now of epoch {status.kv_pool.epoch}; older "
                    "leases are gone"
                )
            writer = KvWriter(
                segment_handle_from_pb(status.kv_pool), kv_layout_from_pb(status.kv_layout)
            )
            try:
                await self._fetch_weights()
            except BaseException:
                writer.close()
                raise
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from failure
        previous, self._writer = self._writer, writer
        self._models.use_pool(writer)
        if previous is not None:
            previous.close()
        logger.info("attached the KV pool %s", writer.handle.name)

    async def _fetch_weights(self) -> None:
        request = memory_service_pb2.GetWeightsRequest()
        manifest: weights_pb2.WeightsManifest | None = None
        entries = []
        call = self._memory_service.GetWeights(request, metadata=outgoing_metadata())
        async with aclosing(received(call)) as responses:
            async for response in responses:
                if response.HasField("progress"):
                    progress = response.progress
                    logger.debug("weights: %d of %d", progress.loaded_bytes, progress.total_bytes)
                elif response.HasField("manifest"):
                    manifest = response.manifest
                    if self.store is not None and self.store.handle.name == manifest.segment.name:
                        return
                else:
                    entries += [tensor_entry_from_pb(tensor) for tensor in response.tensors.tensors]
        if manifest is None or len(entries) != manifest.num_tensors:
            raise InternalError("decode's answer to GetWeights ended before the manifest was whole")
        store = WeightsStore.attach(segment_handle_from_pb(manifest.segment), entries)
        # A GPU's model compiles kernels and takes its memory, which takes seconds.
        await asyncio.to_thread(self._take, manifest, store)

    def _take(self, manifest: weights_pb2.WeightsManifest, store: WeightsStore) -> None:
        spec = ModelSpec.from_json(manifest.config_json, "config.json")
        try:
            model = self._models.make(spec, store)
        except BaseException:
            store.close()
            raise
        previous = self.store
        self.store, self.model = store, model
        self.model_name = manifest.model_name
        self.vocab_size = spec.vocab_size
        logger.info("attached the weights %s of %s", manifest.segment.name, manifest.model_name)
        if previous is not None:
            previous.close()
