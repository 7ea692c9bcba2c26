"""DecodeService: translates between messages and the engine, and ends leases."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError, InvalidRequestError
from headwater.generation import TokenEvent, check_request_id, check_token_id
from headwater.kernels import isa
from headwater.rpc.bridge import EventBridge
from headwater.services.decode.models import hybrid_of
from headwater.services.decode.sampler import SamplerState
from headwater.services.decode.sequence import Sequence
from headwater.telemetry.tracing import span
from headwater.v1 import decode_service_pb2 as pb
from headwater.v1 import decode_service_pb2_grpc
from headwater.wire.costs import pass_costs_to_pb
from headwater.wire.generation import finish_reason_to_pb, sampling_from_pb, token_to_pb
from headwater.wire.kv import kv_layout_to_pb, segment_handle_to_pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from headwater.generation import SamplingParams
    from headwater.kv.lease import KvLease
    from headwater.model.spec import ModelSpec
    from headwater.rpc.interceptor import Context
    from headwater.services.decode.engine import DecodeEngine
    from headwater.services.decode.owner import MemoryOwner


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService; `engine` is set once the memory is ready.

    `read_limit` is what the machine's memory gives, in bytes per second; zero: not measured.
    """

    def __init__(self, owner: MemoryOwner) -> None:
        self._owner = owner
        self._started_at = time.monotonic()
        self.engine: DecodeEngine | None = None
        self.read_limit = 0.0

    async def Generate(
        self, request: pb.DecodeServiceGenerateRequest, context: Context
    ) -> AsyncIterator[pb.DecodeServiceGenerateResponse]:
        """Streams tokens until the answer ends."""
        memory = self._owner.ready()
        params = self._checked_sampling(request)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        lease = memory.pool.pin(request.epoch, request.lease_id, token_ids, _num_prefilled(request))
        try:
            bridge: EventBridge[TokenEvent] = EventBridge()
            sequence = _sequence(request, lease, params, memory.spec, bridge.emit)
            if params.constraint is not None:
                # Compiling may take long, and the other requests must not wait for it.
                sequence.sampler.grammar = await asyncio.to_thread(
                    memory.grammars.compile, params.constraint, tuple(request.output_token_ids)
                )
            attributes = {"headwater.request_id": request.request_id, "headwater.isa": isa()}
            with span("decode", attributes) as current:
                sequence.stages.is_kept = current.is_recording()
                try:
                    # Closed before the lease is finished: the engine uses it until then.
                    async with aclosing(self._events(sequence, bridge)) as events:
                        async for event in events:
                            yield _event_to_pb(event)
                finally:
                    sequence.stages.write(current)
        finally:
            memory.pool.finish(lease)

    async def GetStatus(
        self, request: pb.GetDecodeStatusRequest, context: Context
    ) -> pb.GetDecodeStatusResponse:
        """What the process does now."""
        status = pb.GetDecodeStatusResponse(
            pid=os.getpid(), uptime_seconds=time.monotonic() - self._started_at
        )
        if self.engine is None:
            return status
        memory = self._owner.ready()
        status.model_name = self._owner.model_name
        status.running_requests = self.engine.num_running
        status.waiting_requests = self.engine.num_waiting
        status.generated_tokens = self.engine.generated.total
        status.tokens_per_second = self.engine.generated.per_second()
        status.weights.CopyFrom(segment_handle_to_pb(memory.weights.handle))
        status.weights_reattached = memory.weights.was_reattached
        placement = memory.weights.placement
        if placement is not None:
            status.weights_placement.shard_nodes.extend(placement.nodes)
            status.weights_placement.checked_pages = placement.checked_pages
            status.weights_placement.misplaced_pages = placement.misplaced_pages
            status.weights_placement.problem = placement.problem
        status.kv_pool.CopyFrom(segment_handle_to_pb(memory.kv_segment.handle))
        status.kv_layout.CopyFrom(kv_layout_to_pb(memory.pool.layout))
        status.kv_free_blocks = memory.pool.num_free_blocks
        status.kv_leases = memory.pool.num_leases
        status.kv_quarantined_blocks = memory.pool.num_quarantined_blocks
        status.kv_cached_blocks = memory.pool.num_cached_blocks
        status.prefix_queried_tokens = memory.pool.queried_tokens
        status.prefix_cached_tokens = memory.pool.cached_tokens
        status.preemptions = self.engine.num_preemptions
        status.extend_costs.CopyFrom(pass_costs_to_pb(self.engine.extend_costs))
        status.step_seconds = self.engine.step_seconds
        status.batch_limit = self.engine.batch_limit
        status.pending_extend_tokens = self.engine.num_extending_tokens
        status.dram_bytes = int(self.engine.reading.total)
        status.dram_bytes_per_second = self.engine.reading.per_second()
        status.dram_limit_bytes_per_second = self.read_limit
        hybrid = hybrid_of(memory.model)
        status.uses_gpu = hybrid is not None and hybrid.is_on_device
        status.steps = self.engine.reading.num_pieces
        status.busy_seconds = self.engine.reading.busy_seconds
        return status

    def _checked_sampling(self, request: pb.DecodeServiceGenerateRequest) -> SamplingParams:
        check_request_id(request.request_id)
        params = sampling_from_pb(request.sampling)
        if params.stop:
            raise InvalidRequestError("sampling.stop", "stop strings are the router's business")
        params.check_vocabulary(self._owner.ready().spec.vocab_size)
        return params

    async def _events(
        self, sequence: Sequence, bridge: EventBridge[TokenEvent]
    ) -> AsyncGenerator[TokenEvent, None]:
        """Runs a sequence; when the caller goes away, waits until the engine has let go of it."""
        assert self.engine is not None, "the memory is ready, so the engine runs"
        self.engine.submit(sequence)
        is_over = False
        try:
            while not is_over:
                event = await bridge.next()
                is_over = event.finish_reason is not None
                yield event
        except HeadwaterError:
            is_over = True
            raise
        finally:
            if not is_over:
                sequence.is_cancelled = True
                ending = asyncio.create_task(_wait_for_end(bridge))
                while not ending.done():
                    # Whoever cancels again does not make the engine let go sooner.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.shield(ending)


async def _wait_for_end(bridge: EventBridge[TokenEvent]) -> None:
    with contextlib.suppress(HeadwaterError):
        while (await bridge.next()).finish_reason is None:
            pass


def _num_prefilled(request: pb.DecodeServiceGenerateRequest) -> int | None:
    """Tokens of prompt and output that prefill computed; None: decode computes them.

    Raises InvalidRequestError.
    """
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if request.HasField("prefilled_tokens"):
        if not 1 <= request.prefilled_tokens <= num_prompt:
            raise InvalidRequestError(
                "prefilled_tokens",
                f"must be 1 to {num_prompt}, the tokens of the prompt, got "
                f"{request.prefilled_tokens}",
            )
        return request.prefilled_tokens
    return None if request.extends_prompt else num_prompt + num_output


def _tpot_seconds(request: pb.DecodeServiceGenerateRequest) -> float | None:
    if not request.HasField("tpot_objective_seconds"):
        return None
    wish = request.tpot_objective_seconds
    if not (math.isfinite(wish) and wish > 0.0):
        raise InvalidRequestError(
            "tpot_objective_seconds", f"must be positive and finite, got {wish!r}"
        )
    return wish


def _sequence(
    request: pb.DecodeServiceGenerateRequest,
    lease: KvLease,
    params: SamplingParams,
    spec: ModelSpec,
    emit: Callable[[TokenEvent | HeadwaterError], None],
) -> Sequence:
    """The request as the engine takes it.

    Raises InvalidRequestError when its tokens do not fit the lease, the model or the vocabulary.
    """
    prompt, output = list(request.prompt_token_ids), list(request.output_token_ids)
    tokens = prompt + output
    longest = min(lease.capacity_tokens, spec.max_context_tokens - 1)
    if not prompt or not lease.cached_tokens < len(tokens) <= longest:
        raise InvalidRequestError(
            "prompt_token_ids",
            f"must be {lease.cached_tokens + 1} to {longest} tokens, as lease and model hold, got "
            f"{len(tokens)}",
        )
    for token_id in tokens:
        check_token_id("prompt_token_ids", token_id, spec.vocab_size)
    room = spec.max_context_tokens - len(prompt)
    num_prefilled = _num_prefilled(request)
    num_computed = lease.cached_tokens if num_prefilled is None else num_prefilled
    return Sequence(
        request_id=request.request_id,
        lease=lease,
        tokens=tokens,
        num_prompt=len(prompt),
        max_tokens=min(room, params.max_tokens or room),
        sampler=SamplerState.create(params, prompt, spec.eos_token_ids, output),
        emit=emit,
        priority=request.priority,
        tpot_seconds=_tpot_seconds(request),
        num_computed=num_computed,
        # Prefill leaves the state of its last token; one that goes on elsewhere needs none.
        has_hidden=num_computed == len(tokens),
        block_ids=list(lease.block_ids),
    )


def _event_to_pb(event: TokenEvent) -> pb.DecodeServiceGenerateResponse:
    return pb.DecodeServiceGenerateResponse(
        tokens=[token_to_pb(token) for token in event.tokens],
        finish_reason=finish_reason_to_pb(event.finish_reason),
        stop_token_id=event.stop_token_id,
    )
