"""What a hostile or broken caller sends, and what it may get for it.

Each attack says how it ended, as "OK", "left", the name of a status, or what the connection did.
A status that is a fault of ours, or that does not say what was wrong, is noted as a complaint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headwater.kv.hashing import block_hashes
from headwater.v1 import (
    decode_service_pb2,
    memory_service_pb2,
    memory_service_pb2_grpc,
    prefill_service_pb2,
)
from tests.fuzz import http2
from tests.fuzz.messages import mutate_bytes, mutate_fields, random_message
from tests.fuzz.targets import (
    SHARED_PROMPTS,
    UNOFFERED,
    Method,
    all_methods,
    good_message,
    names_a_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from google.protobuf.message import Message

# gRPC's own limit for a message (rpc/server.py), and one more byte.
_TOO_LARGE = 16 * 1024 * 1024 + 1
_MAX_MESSAGES_READ = 40
# Of the stack's pool.
_BLOCK_TOKENS = 16
_FAIR = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_METHODS = all_methods()
_PREFILL = next(m for m in _METHODS if m.name == "Prefill")
_GENERATE = next(m for m in _METHODS if m.path == "/headwater.v1.DecodeService/Generate")


@dataclass(slots=True)
class Attacker:
    """Attacks one stack, one after the other, with the draws of one generator."""

    addresses: Mapping[str, str]
    channels: Mapping[str, grpc.aio.Channel]
    draw: Random
    complaints: list[str] = field(default_factory=list)

    async def message(self) -> str:
        """A random message for a random method."""
        method = self.draw.choice(_METHODS)
        return await self._send(method, random_message(self.draw, method.input_type))

    async def fields(self) -> str:
        """A good message with some fields changed."""
        method = self.draw.choice(_METHODS)
        message = good_message(method)
        mutate_fields(self.draw, message)
        return await self._send(method, message)

    async def broken(self) -> str:
        """A good or random message with its bytes broken."""
        method = self.draw.choice(_METHODS)
        message = self.draw.choice(
            (good_message(method), random_message(self.draw, method.input_type))
        )
        data = mutate_bytes(self.draw, message.SerializeToString())
        return await self._call(method, data)

    async def lease(self) -> str:
        """A lease that is alive, with wrong uses of it at both engines.

        One of them is to compute, or to go on, another prompt than it was reserved for.
        """
        memory = memory_service_pb2_grpc.MemoryServiceStub(self.channels["decode"])
        num_tokens = self.draw.randrange(1, 100)
        token_ids = self._shared_prompt(num_tokens)
        asked = memory_service_pb2.ReserveKvRequest(
            prompt_tokens=num_tokens,
            max_new_tokens=4,
            block_hashes=block_hashes(token_ids, _BLOCK_TOKENS),
        )
        try:
            lease = (await memory.ReserveKv(asked, timeout=10)).lease
        except grpc.aio.AioRpcError as failure:
            return str(failure.code().name)
        if self.draw.random() < 0.2:
            token_ids = self._shared_prompt(num_tokens)
        compute = prefill_service_pb2.PrefillRequest(token_ids=token_ids, lease=lease)
        if self.draw.random() < 0.7:
            mutate_fields(self.draw, compute)
        await self._send(_PREFILL, compute)
        if self.draw.random() < 0.2:
            token_ids = self._shared_prompt(num_tokens)
        generate = decode_service_pb2.DecodeServiceGenerateRequest(
            lease_id=lease.lease_id,
            epoch=lease.segment.epoch,
            prompt_token_ids=token_ids,
            extends_prompt=self.draw.random() < 0.3,
        )
        generate.sampling.max_tokens = 4
        if self.draw.random() < 0.7:
            mutate_fields(self.draw, generate)
        how = await self._send(_GENERATE, generate)
        if self.draw.random() < 0.5:
            fork = memory_service_pb2.ForkKvRequest(
                epoch=lease.segment.epoch,
                lease_id=lease.lease_id,
                prompt_tokens=self.draw.choice((0, 1, num_tokens, num_tokens + 1, (1 << 32) - 1)),
            )
            await self._send(next(m for m in _METHODS if m.name == "ForkKv"), fork)
        if self.draw.random() < 0.9:  # the others expire
            await memory.ReleaseKv(
                memory_service_pb2.ReleaseKvRequest(
                    epoch=lease.segment.epoch, lease_ids=[lease.lease_id]
                ),
                timeout=10,
            )
        return how

    async def oversized(self) -> str:
        """More bytes, tokens or headers than are taken."""
        method = self.draw.choice(_METHODS)
        match self.draw.randrange(3):
            case 0:
                size = self.draw.choice((_TOO_LARGE, 2 * _TOO_LARGE))
                return await self._call(method, bytes(size), may_be_bare=True)
            case 1:
                message = good_message(method)
                for each in message.DESCRIPTOR.fields:
                    if each.type == each.TYPE_STRING and not each.is_repeated:
                        setattr(message, each.name, "long " * 200_000)
                return await self._send(method, message)
            case _:
                headers = [("x-large", "v" * self.draw.choice((9_000, 60_000, 1_000_000)))]
                return await self._call(method, b"", metadata=headers, may_be_bare=True)

    async def unknown(self) -> str:
        """Methods that do not exist."""
        process = self.draw.choice(list(self.addresses))
        path = self.draw.choice(
            (
                "/headwater.v1.RouterService/Nothing",
                "/headwater.v2.RouterService/Generate",
                "/headwater.v1.DecodeService/generate",
                "/",
                "//",
                "/x",
                "/" + "long" * 500,
            )
        )
        ask: Any = self.channels[process].unary_unary(path)
        code: grpc.StatusCode = await ask(b"", timeout=10).code()
        if code is not grpc.StatusCode.UNIMPLEMENTED:
            self.complaints.append(f"{path} of {process}: {code}")
        return code.name

    async def connection(self) -> str:
        """A connection that breaks the rules below gRPC."""
        method = self.draw.choice(_METHODS)
        data = good_message(method).SerializeToString()
        script = self.draw.choice(http2.scripts(self.draw, method.path, data))
        how = await http2.play(self.addresses[method.process], script)
        return f"{script.name}: {how}"

    def _shared_prompt(self, num_tokens: int) -> tuple[int, ...]:
        return self.draw.choice(SHARED_PROMPTS)[:num_tokens]

    async def _send(self, method: Method, message: Message) -> str:
        return await self._call(method, message.SerializeToString(), sent=message)

    async def _call(
        self,
        method: Method,
        data: bytes,
        *,
        sent: Message | None = None,
        metadata: list[tuple[str, str]] | None = None,
        may_be_bare: bool = False,
    ) -> str:
        """Calls with raw bytes; reads some of the answer, or all of it."""
        seconds = self.draw.choice((0.02, 0.3, 1.0, 2.0))
        most = self.draw.choice((0, 1, 5, _MAX_MESSAGES_READ))
        ask: Any = self.channels[method.process].unary_stream(method.path)
        call = ask(data, timeout=seconds, metadata=metadata)
        num_read = 0
        try:
            async for _ in call:
                num_read += 1
                if num_read > most:
                    return "left"
        except grpc.aio.AioRpcError as failure:
            self._judge(method, failure, sent, may_be_bare=may_be_bare)
            return failure.code().name
        finally:
            call.cancel()
        return "OK"

    def _judge(
        self,
        method: Method,
        failure: grpc.aio.AioRpcError,
        sent: Message | None,
        *,
        may_be_bare: bool,
    ) -> None:
        """Notes a failure that is not the caller's, or that does not say what was wrong."""
        code = failure.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        if code is grpc.StatusCode.UNIMPLEMENTED and method.name in UNOFFERED:
            return
        if may_be_bare and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return
        problem = ""
        if code not in _FAIR:
            problem = "is no status for a caller's fault"
        elif method.is_ours:
            problem = _missing_details(method, failure)
        if problem:
            what = "" if sent is None else f", sent {str(sent)[:500]!r}"
            self.complaints.append(
                f"{method.process} {method.path}: {code.name} {problem}: "
                f"{(failure.details() or '')[:500]!r}{what}"
            )


def _missing_details(method: Method, failure: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(failure)
    details = {} if status is None else {d.TypeName(): d for d in status.details}
    info = error_details_pb2.ErrorInfo()
    if "google.rpc.ErrorInfo" not in details or not details["google.rpc.ErrorInfo"].Unpack(info):
        return "has no ErrorInfo"
    if failure.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        return ""
    bad = error_details_pb2.BadRequest()
    if "google.rpc.BadRequest" not in details or not details["google.rpc.BadRequest"].Unpack(bad):
        return "has no BadRequest"
    named = bad.field_violations[0].field
    # "request" is the whole of a message that cannot be parsed.
    if named == "request" or names_a_field(method.input_type, named):
        return ""
    return f"names {named!r}, which is no field of {method.input_type.full_name}"
