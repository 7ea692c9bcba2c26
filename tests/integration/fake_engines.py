"""Prefill and decode as real gRPC servers that play a script: no model, no torch, no memory.

What the router asked for is recorded, and each stage can be held with an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import HeadwaterError
from headwater.rpc.link import PLAIN, Link
from headwater.rpc.server import Registration, Server
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    generation_pb2,
    kv_pb2,
    memory_service_pb2,
    memory_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
)

EOS_TOKEN_ID = 2
BLOCK_TOKENS = 16


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class FakePrefill(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Reports progress in four steps; waits at `gate` after the first."""

    gate: asyncio.Event = field(default_factory=_open_gate)
    error: HeadwaterError | None = None
    requests: list[prefill_service_pb2.PrefillRequest] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Prefill(
        self, request: prefill_service_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_service_pb2.PrefillResponse]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        try:
            for done in range(1, 5):
                yield prefill_service_pb2.PrefillResponse(
                    progress=prefill_service_pb2.PrefillProgress(
                        done_token_layers=done, total_token_layers=4
                    )
                )
                self.started.set()
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield prefill_service_pb2.PrefillResponse(
            done=prefill_service_pb2.PrefillDone(computed_tokens=len(request.token_ids))
        )


@dataclass
class FakeDecode(
    decode_service_pb2_grpc.DecodeServiceServicer, memory_service_pb2_grpc.MemoryServiceServicer
):
    """Grants leases and plays `script`; after two tokens each one takes a permit."""

    script: list[int] = field(default_factory=list)
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(10_000))
    ttl_ms: int = 30_000
    epoch: int = 7
    reserve_errors: list[HeadwaterError] = field(default_factory=list)
    generate_error: HeadwaterError | None = None
    requests: list[decode_service_pb2.DecodeServiceGenerateRequest] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    renewed: asyncio.Event = field(default_factory=asyncio.Event)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    _next_lease_id: int = 1

    async def ForkKv(
        self, request: memory_service_pb2.ForkKvRequest, context: Any
    ) -> memory_service_pb2.ForkKvResponse:
        assert request.lease_id in self.alive
        reply = await self.ReserveKv(memory_service_pb2.ReserveKvRequest(), context)
        return memory_service_pb2.ForkKvResponse(lease=reply.lease)

    async def ReserveKv(
        self, request: memory_service_pb2.ReserveKvRequest, context: Any
    ) -> memory_service_pb2.ReserveKvResponse:
        if self.reserve_errors:
            raise self.reserve_errors.pop(0)
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        self.alive.add(lease_id)
        self.freed.clear()
        return memory_service_pb2.ReserveKvResponse(
            lease=kv_pb2.KvLease(
                lease_id=lease_id,
                segment=kv_pb2.SegmentHandle(name="fake", epoch=self.epoch),
                cached_tokens=1 if request.prompt_tokens > 1 else 0,
                ttl_ms=self.ttl_ms,
            )
        )

    async def RenewKv(
        self, request: memory_service_pb2.RenewKvRequest, context: Any
    ) -> memory_service_pb2.RenewKvResponse:
        self.renewed.set()
        return memory_service_pb2.RenewKvResponse(
            expired_lease_ids=[i for i in request.lease_ids if i not in self.alive]
        )

    async def ReleaseKv(
        self, request: memory_service_pb2.ReleaseKvRequest, context: Any
    ) -> memory_service_pb2.ReleaseKvResponse:
        for lease_id in request.lease_ids:
            self._free(lease_id)
        return memory_service_pb2.ReleaseKvResponse()

    async def Generate(
        self, request: decode_service_pb2.DecodeServiceGenerateRequest, context: Any
    ) -> AsyncIterator[decode_service_pb2.DecodeServiceGenerateResponse]:
        self.requests.append(request)
        try:
            if self.generate_error is not None:
                raise self.generate_error
            async for response in self._play(request):
                yield response
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self._free(request.lease_id)

    async def _play(
        self, request: decode_service_pb2.DecodeServiceGenerateRequest
    ) -> AsyncIterator[decode_service_pb2.DecodeServiceGenerateResponse]:
        limit = min(len(self.script), request.sampling.max_tokens)
        for position, token_id in enumerate(self.script[:limit]):
            if position >= 2:
                self.started.set()
                await self.permits.acquire()
            stops = {EOS_TOKEN_ID, *request.sampling.stop_token_ids}
            is_stop = token_id in stops and not request.sampling.ignore_eos
            reason = generation_pb2.FINISH_REASON_UNSPECIFIED
            if is_stop:
                reason = generation_pb2.FINISH_REASON_STOP
            elif position + 1 == limit:
                reason = generation_pb2.FINISH_REASON_LENGTH
            yield decode_service_pb2.DecodeServiceGenerateResponse(
                tokens=[_token(token_id, request.sampling)],
                finish_reason=reason,
                stop_token_id=token_id if is_stop else None,
            )
            if reason:
                return

    async def GetStatus(
        self, request: decode_service_pb2.GetDecodeStatusRequest, context: Any
    ) -> decode_service_pb2.GetDecodeStatusResponse:
        return decode_service_pb2.GetDecodeStatusResponse(
            kv_layout=kv_pb2.KvLayout(num_blocks=64, block_tokens=BLOCK_TOKENS),
            kv_free_blocks=64 - len(self.alive),
        )

    def _free(self, lease_id: int) -> None:
        self.alive.discard(lease_id)
        if not self.alive:
            self.freed.set()


def _token(token_id: int, sampling: generation_pb2.SamplingParams) -> generation_pb2.Token:
    if not sampling.HasField("logprobs"):
        return generation_pb2.Token(token_id=token_id)
    top = [
        generation_pb2.TokenLogprob(token_id=token_id, logprob=-0.5),
        generation_pb2.TokenLogprob(token_id=token_id + 1, logprob=-1.5),
    ]
    return generation_pb2.Token(
        token_id=token_id, logprob=-0.5, top_logprobs=top[: sampling.logprobs]
    )


@dataclass
class Engine:
    """A running engine server."""

    server: Server
    address: str


@contextlib.asynccontextmanager
async def serving_prefill(
    prefill: FakePrefill, port: int = 0, link: Link = PLAIN
) -> AsyncIterator[Engine]:
    """Serves until the end of the block."""
    registration = Registration(
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
        prefill,
        "headwater.v1.PrefillService",
    )
    async with _serving((registration,), port, link) as engine:
        yield engine


@contextlib.asynccontextmanager
async def serving_decode(
    decode: FakeDecode, port: int = 0, link: Link = PLAIN
) -> AsyncIterator[Engine]:
    """Serves until the end of the block."""
    registrations = (
        Registration(
            decode_service_pb2_grpc.add_DecodeServiceServicer_to_server,
            decode,
            "headwater.v1.DecodeService",
        ),
        Registration(
            memory_service_pb2_grpc.add_MemoryServiceServicer_to_server,
            decode,
            "headwater.v1.MemoryService",
        ),
    )
    async with _serving(registrations, port, link) as engine:
        yield engine


@contextlib.asynccontextmanager
async def _serving(
    registrations: tuple[Registration, ...], port: int, link: Link
) -> AsyncIterator[Engine]:
    server = Server(f"127.0.0.1:{port}", registrations, link)
    bound = await server.start()
    await server.set_ready(True)
    try:
        yield Engine(server, f"127.0.0.1:{bound}")
    finally:
        await server.stop(0)
