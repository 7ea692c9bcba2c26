"""A typed asyncio client of headwater.v1.RouterService, for Python programs and the CLI."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Self

import grpc

from headwater.errors import UnavailableError
from headwater.generation import SamplingParams, TextEvent
from headwater.rpc.channel import open_channel
from headwater.rpc.link import PLAIN
from headwater.rpc.streams import received
from headwater.rpc.tls_problem import tls_problem
from headwater.telemetry.metrics import record_client_call
from headwater.telemetry.tracing import outgoing_metadata
from headwater.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc
from headwater.wire.generation import (
    finish_reason_from_pb,
    sampling_to_pb,
    timings_from_pb,
    token_from_pb,
    usage_from_pb,
)
from headwater.wire.status import error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from headwater.errors import HeadwaterError
    from headwater.generation import Usage
    from headwater.rpc.link import Link

DEFAULT_ADDRESS = "127.0.0.1:50050"


class Client:
    """Talks to one router. Use it as an asynchronous context manager, or call `close`.

    TLS: Client("node:50050", Link(TlsConfig(ca="ca.pem", cert="me.pem", key="me.key"))), without
    `cert` and `key` where the router wants none. Raises ConfigError when a file cannot be used.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, link: Link = PLAIN) -> None:
        self._address = address
        self._link = link
        self._channel = open_channel(address, link)
        self._router = router_service_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        objective_class: str = "",
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[TextEvent, None]:
        """Continues a text or a list of token ids.

        `objective_class` names one of the router's classes of service objectives; empty means its
        default. Raises the HeadwaterError that the service reports.
        """
        request = router_service_pb2.GenerateRequest(objective_class=objective_class)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        async with aclosing(
            self._stream("text_completion", request, sampling, timeout_seconds)
        ) as events:
            async for event in events:
                yield event

    async def chat(
        self,
        messages: Sequence[tuple[str, str]],
        sampling: SamplingParams | None = None,
        *,
        objective_class: str = "",
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[TextEvent, None]:
        """Answers a conversation of (role, content) turns; see `generate`.

        Raises the HeadwaterError that the service reports.
        """
        request = router_service_pb2.GenerateRequest(objective_class=objective_class)
        for role, content in messages:
            request.chat.messages.add(role=role, content=content)
        async with aclosing(self._stream("chat", request, sampling, timeout_seconds)) as events:
            async for event in events:
                yield event

    async def _error_from(self, failure: grpc.aio.AioRpcError) -> HeadwaterError:
        """Says what is wrong with TLS, where that is why the router cannot be reached."""
        error = error_from_rpc(failure)
        if not isinstance(error, UnavailableError) or failure.trailing_metadata():
            return error
        problem = await asyncio.to_thread(tls_problem, self._address, self._link.tls)
        return error if problem is None else UnavailableError(problem)

    async def _stream(
        self,
        operation: str,
        request: router_service_pb2.GenerateRequest,
        sampling: SamplingParams | None,
        timeout_seconds: float | None,
    ) -> AsyncGenerator[TextEvent, None]:
        began_at = time.monotonic()
        usage: Usage | None = None
        error_type: str | None = "CancelledError"
        if sampling is not None:
            request.sampling.CopyFrom(sampling_to_pb(sampling))
        call = self._router.Generate(request, timeout=timeout_seconds, metadata=outgoing_metadata())
        try:
            # Closing it ends the request at the server when the caller stops listening.
            async with aclosing(received(call)) as responses:
                async for response in responses:
                    event = _event_from_pb(response)
                    usage = event.usage or usage
                    yield event
            error_type = None
        except grpc.aio.AioRpcError as failure:
            error = await self._error_from(failure)
            error_type = type(error).__name__
            raise error from failure
        finally:
            record_client_call(operation, time.monotonic() - began_at, usage, error_type)


def _event_from_pb(message: router_service_pb2.GenerateResponse) -> TextEvent:
    is_last = message.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED
    return TextEvent(
        text=message.text,
        tokens=tuple(token_from_pb(token) for token in message.tokens),
        finish_reason=finish_reason_from_pb(message.finish_reason),
        usage=usage_from_pb(message.usage) if is_last else None,
        timings=timings_from_pb(message.timings) if is_last else None,
        prefill_progress=message.prefill_progress if message.HasField("prefill_progress") else None,
    )
