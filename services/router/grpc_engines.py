"""The engines over gRPC: headwater.services.router.engines, translated to headwater.v1."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import grpc

from headwater.errors import (
    CancelledError,
    DeadlineError,
    HeadwaterError,
    LeaseError,
    SegmentError,
    UnavailableError,
)
from headwater.generation import TokenEvent
from headwater.kv.hashing import block_hashes
from headwater.rpc.channel import open_channel
from headwater.rpc.streams import received
from headwater.services.router.engines import KvUse, Lease
from headwater.services.router.health import HealthWatch
from headwater.services.router.policy import (
    UNKNOWN_BATCH_LIMIT,
    DecodeLoad,
    PrefillLoad,
)
from headwater.telemetry.tracing import outgoing_metadata, span
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    memory_service_pb2,
    memory_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
)
from headwater.wire.costs import pass_costs_from_pb
from headwater.wire.generation import finish_reason_from_pb, sampling_to_pb, token_from_pb
from headwater.wire.status import error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from typing import Any

    from headwater.generation import SamplingParams
    from headwater.rpc.link import Link
    from headwater.v1 import kv_pb2

# Calls that need no computation: an engine that takes longer is not well.
_CONTROL_SECONDS = 10.0


class Peer:
    """One engine process: its channel, its health, and how its failures are reported."""

    def __init__(self, name: str, address: str, service_name: str, link: Link) -> None:
        self.name = name
        self.address = address
        self.channel = open_channel(address, link)
        self._health = HealthWatch(f"{name} at {address}", self.channel, service_name)

    @property
    def is_serving(self) -> bool:
        """Whether its last health check said SERVING."""
        return self._health.is_serving

    def start(self, on_change: Callable[[], None]) -> None:
        """Begins to watch the engine's health; `on_change` is called after each change."""
        self._health.start(on_change)

    async def close(self) -> None:
        """Ends the watch and the connection."""
        await self._health.stop()
        await self.channel.close()

    async def control(
        self,
        method: Callable[..., Awaitable[Any]],
        request: object,
        doing: str,
        deadline: float | None = None,
    ) -> Any:
        """One unary call that ends soon; raises what `error` makes of its failure."""
        left = _seconds_left(deadline)
        is_ours = left is None or left > _CONTROL_SECONDS
        timeout = _CONTROL_SECONDS if is_ours else left
        try:
            return await method(request, timeout=timeout, metadata=outgoing_metadata())
        except grpc.aio.AioRpcError as failure:
            if is_ours and failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnavailableError(
                    f"{self.name} at {self.address} did not answer within {_CONTROL_SECONDS:g} s "
                    f"while {doing}; the request was not completed; retry"
                ) from failure
            raise self.error(failure, doing) from failure

    def error(self, failure: grpc.aio.AioRpcError, doing: str) -> HeadwaterError:
        """The error for our caller; `doing` says what the request was at."""
        error = error_from_rpc(failure)
        # A server that stops cancels its calls; our own cancellations never come here.
        if isinstance(error, UnavailableError | CancelledError):
            return UnavailableError(
                f"{self.name} at {self.address} went away while {doing} ({error}); the request "
                "was not completed; retry"
            )
        if isinstance(error, LeaseError | SegmentError):
            return UnavailableError(
                f"{self.name} at {self.address} lost the request's KV lease while {doing} "
                f"({error}); the request was not completed; retry"
            )
        if isinstance(error, DeadlineError):
            return DeadlineError(f"the request's deadline passed while {self.name} was {doing}")
        return error


class GrpcPrefill(Peer):
    """PrefillEngine over PrefillService."""

    def __init__(self, address: str, link: Link) -> None:
        super().__init__("prefill", address, "headwater.v1.PrefillService", link)
        self._service = prefill_service_pb2_grpc.PrefillServiceStub(self.channel)

    async def load(self) -> PrefillLoad:
        """See PrefillEngine."""
        request = prefill_service_pb2.GetPrefillStatusRequest()
        status = await self.control(self._service.GetStatus, request, "telling its status")
        return PrefillLoad(pass_costs_from_pb(status.costs))

    async def prefill(
        self,
        request_id: str,
        token_ids: Sequence[int],
        lease: Lease,
        priority: int,
        deadline: float | None,
    ) -> AsyncGenerator[float, None]:
        """See PrefillEngine."""
        request = prefill_service_pb2.PrefillRequest(
            request_id=request_id,
            token_ids=token_ids,
            lease=cast("kv_pb2.KvLease", lease.handle),
            priority=priority,
        )
        with span("router.prefill"):
            call = self._service.Prefill(
                request, timeout=_seconds_left(deadline), metadata=outgoing_metadata()
            )
            try:
                async with aclosing(received(call)) as replies:
                    async for reply in replies:
                        if reply.HasField("progress"):
                            yield _share(reply.progress)
            except grpc.aio.AioRpcError as failure:
                raise self.error(failure, "computing the prompt") from failure


class GrpcDecode(Peer):
    """DecodeEngine over DecodeService and MemoryService."""

    def __init__(self, address: str, link: Link) -> None:
        super().__init__("decode", address, "headwater.v1.DecodeService", link)
        self._service = decode_service_pb2_grpc.DecodeServiceStub(self.channel)
        self._memory = memory_service_pb2_grpc.MemoryServiceStub(self.channel)
        # Learned from the first lease; before it there is nothing in the pool to find anyway.
        self._block_tokens: int | None = None

    async def reserve(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_new_tokens: int,
        deadline: float | None,
    ) -> Lease:
        """See DecodeEngine."""
        names = block_hashes(token_ids, self._block_tokens) if self._block_tokens else ()
        request = memory_service_pb2.ReserveKvRequest(
            request_id=request_id,
            prompt_tokens=len(token_ids),
            max_new_tokens=max_new_tokens,
            block_hashes=names,
        )
        reply = await self.control(self._memory.ReserveKv, request, "reserving KV blocks", deadline)
        self._block_tokens = reply.lease.layout.block_tokens
        return _lease_from_pb(reply.lease)

    async def fork(self, lease: Lease, prompt_tokens: int, deadline: float | None) -> Lease:
        """See DecodeEngine."""
        request = memory_service_pb2.ForkKvRequest(
            epoch=lease.epoch, lease_id=lease.id, prompt_tokens=prompt_tokens
        )
        reply = await self.control(self._memory.ForkKv, request, "forking a lease", deadline)
        return _lease_from_pb(reply.lease)

    async def renew(self, epoch: int, lease_ids: Sequence[int]) -> frozenset[int]:
        """See DecodeEngine."""
        request = memory_service_pb2.RenewKvRequest(epoch=epoch, lease_ids=lease_ids)
        reply = await self.control(self._memory.RenewKv, request, "renewing leases")
        return frozenset(reply.expired_lease_ids)

    async def release(self, epoch: int, lease_ids: Sequence[int]) -> None:
        """See DecodeEngine."""
        request = memory_service_pb2.ReleaseKvRequest(epoch=epoch, lease_ids=lease_ids)
        await self.control(self._memory.ReleaseKv, request, "releasing leases")

    async def load(self) -> DecodeLoad:
        """See DecodeEngine."""
        request = decode_service_pb2.GetDecodeStatusRequest()
        status = await self.control(self._service.GetStatus, request, "telling its status")
        return DecodeLoad(
            step_seconds=status.step_seconds,
            extend_costs=pass_costs_from_pb(status.extend_costs),
            batch_limit=status.batch_limit or UNKNOWN_BATCH_LIMIT,
        )

    async def kv_use(self) -> KvUse:
        """See DecodeEngine."""
        request = decode_service_pb2.GetDecodeStatusRequest()
        status = await self.control(self._service.GetStatus, request, "telling its status")
        layout = status.kv_layout
        return KvUse(layout.num_blocks, status.kv_free_blocks, layout.block_tokens)

    async def generate(
        self,
        request_id: str,
        lease: Lease,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int,
        tpot_seconds: float,
        deadline: float | None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """See DecodeEngine."""
        request = decode_service_pb2.DecodeServiceGenerateRequest(
            request_id=request_id,
            lease_id=lease.id,
            epoch=lease.epoch,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            sampling=sampling_to_pb(sampling),
            priority=priority,
            extends_prompt=not lease.prefilled_tokens,
            prefilled_tokens=lease.prefilled_tokens or None,
            tpot_objective_seconds=tpot_seconds,
        )
        with span("router.decode"):
            call = self._service.Generate(
                request, timeout=_seconds_left(deadline), metadata=outgoing_metadata()
            )
            try:
                async with aclosing(received(call)) as replies:
                    async for reply in replies:
                        yield _token_event(reply)
            except grpc.aio.AioRpcError as failure:
                raise self.error(failure, "generating") from failure


def _lease_from_pb(message: kv_pb2.KvLease) -> Lease:
    return Lease(
        id=message.lease_id,
        epoch=message.segment.epoch,
        cached_tokens=message.cached_tokens,
        ttl_seconds=message.ttl_ms / 1000,
        handle=message,
    )


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _share(progress: prefill_service_pb2.PrefillProgress) -> float:
    return progress.done_token_layers / max(1, progress.total_token_layers)


def _token_event(reply: decode_service_pb2.DecodeServiceGenerateResponse) -> TokenEvent:
    return TokenEvent(
        tokens=tuple(token_from_pb(token) for token in reply.tokens),
        finish_reason=finish_reason_from_pb(reply.finish_reason),
        stop_token_id=reply.stop_token_id if reply.HasField("stop_token_id") else None,
    )
