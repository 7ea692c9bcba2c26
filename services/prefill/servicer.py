"""PrefillService: translates between messages and the engine."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from headwater.errors import InvalidRequestError, UnavailableError
from headwater.generation import check_request_id, check_token_id
from headwater.kernels import isa
from headwater.rpc.bridge import EventBridge
from headwater.services.prefill.job import PrefillDone, PrefillJob, PrefillProgress
from headwater.telemetry.tracing import span
from headwater.v1 import prefill_service_pb2 as pb
from headwater.v1 import prefill_service_pb2_grpc
from headwater.wire.costs import pass_costs_to_pb
from headwater.wire.kv import kv_lease_from_pb, segment_handle_to_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headwater.kv.lease import KvLease
    from headwater.rpc.interceptor import Context
    from headwater.services.prefill.attachment import Attachment
    from headwater.services.prefill.engine import PrefillEngine
    from headwater.services.prefill.models import PromptModels


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService."""

    def __init__(self, attachment: Attachment, engine: PrefillEngine, models: PromptModels) -> None:
        self._attachment = attachment
        self._engine = engine
        self._models = models
        self._started_at = time.monotonic()

    async def Prefill(
        self, request: pb.PrefillRequest, context: Context
    ) -> AsyncIterator[pb.PrefillResponse]:
        """Streams progress and ends with the summary."""
        check_request_id(request.request_id)
        if self._attachment.model is None:
            raise UnavailableError("prefill has not attached the weights yet; try again")
        lease = kv_lease_from_pb(request.lease)
        model, writer = await self._attachment.writer_for(lease)
        token_ids = self._checked_prompt(request, lease)
        bridge: EventBridge[PrefillProgress | PrefillDone] = EventBridge()
        job = PrefillJob(
            request.request_id,
            token_ids,
            lease,
            model,
            writer,
            bridge.emit,
            priority=request.priority,
        )
        attributes: dict[str, str | int] = {
            "headwater.request_id": request.request_id,
            "headwater.prompt_tokens": len(token_ids),
            "headwater.isa": isa(),
        }
        with span("prefill", attributes) as current:
            job.stages.is_kept = current.is_recording()
            self._engine.submit(job)
            try:
                while isinstance(event := await bridge.next(), PrefillProgress):
                    yield _progress_to_pb(event)
                yield _done_to_pb(event)
            finally:
                job.cancelled.set()
                job.stages.write(current)

    async def GetStatus(
        self, request: pb.GetPrefillStatusRequest, context: Context
    ) -> pb.GetPrefillStatusResponse:
        """What the process does now."""
        status = pb.GetPrefillStatusResponse(
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started_at,
            model_name=self._attachment.model_name,
            running_requests=self._engine.num_running,
            waiting_requests=self._engine.num_waiting,
            prompt_tokens=self._engine.computed.total,
            tokens_per_second=self._engine.computed.per_second(),
            costs=pass_costs_to_pb(self._engine.costs),
            pending_tokens=self._engine.num_pending_tokens,
            passes=self._engine.num_passes,
            h2d_bytes=int(self._engine.streaming.total),
            h2d_bytes_per_second=self._engine.streaming.per_second(),
            ring_occupancy=self._models.ring_occupancy,
            gpus=self._models.num_gpus,
            lost_ranks=self._models.num_lost,
        )
        ways = self._engine.ways
        for way, costs in ways.all_costs.items() if len(ways.passes) > 1 else ():
            passes = ways.passes.get(way, 0)
            status.ways.add(gpus=way, costs=pass_costs_to_pb(costs), passes=passes)
        if self._attachment.store is not None:
            status.weights.CopyFrom(segment_handle_to_pb(self._attachment.store.handle))
        return status

    def _checked_prompt(self, request: pb.PrefillRequest, lease: KvLease) -> tuple[int, ...]:
        token_ids = tuple(request.token_ids)
        if not lease.cached_tokens < len(token_ids) <= lease.capacity_tokens:
            raise InvalidRequestError(
                "token_ids",
                f"must be {lease.cached_tokens + 1} to {lease.capacity_tokens} tokens, as the "
                f"lease holds, got {len(token_ids)}",
            )
        for token_id in token_ids:
            check_token_id("token_ids", token_id, self._attachment.vocab_size)
        return token_ids


def _progress_to_pb(progress: PrefillProgress) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        progress=pb.PrefillProgress(
            done_token_layers=progress.done, total_token_layers=progress.total
        )
    )


def _done_to_pb(done: PrefillDone) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        done=pb.PrefillDone(
            computed_tokens=done.computed_tokens,
            queue_seconds=done.queue_seconds,
            compute_seconds=done.compute_seconds,
        )
    )
