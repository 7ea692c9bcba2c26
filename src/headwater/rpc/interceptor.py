"""The one place where errors become statuses and where the caller's trace context is taken over.

Servicer methods raise HeadwaterErrors and know nothing of codes. Anything else that escapes is a
fault of ours: it is logged with its traceback and becomes INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from headwater.errors import HeadwaterError, InternalError
from headwater.rpc.ending import end_with, letting_go
from headwater.rpc.parsing import Malformed, forgiving, guarded
from headwater.telemetry.tracing import failed, server_span
from headwater.wire.status import code_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from opentelemetry.trace import Span

    from headwater.rpc.calls import RunningCalls

logger = logging.getLogger(__name__)

# Of the caller; our own servers answer nobody then.
_CANCELLED = grpc.StatusCode.CANCELLED.value[0]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ErrorAndTraceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each of our own methods; of health and reflection only what they cannot answer."""

    def __init__(self, calls: RunningCalls, max_message_bytes: int) -> None:
        self._calls = calls
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler of the method, wrapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        if method.startswith("/grpc."):
            return guarded(method, handler, self._max_message_bytes)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _wrap_unary(method, handler.unary_unary, self._calls),
                request_deserializer=forgiving(
                    handler.request_deserializer, self._max_message_bytes
                ),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_stream_rpc_method_handler(
            _wrap_stream(method, handler.unary_stream, self._calls),
            request_deserializer=forgiving(handler.request_deserializer, self._max_message_bytes),
            response_serializer=handler.response_serializer,
        )


def _wrap_unary(
    method: str, behavior: Callable[[Any, Context], Awaitable[Any]], calls: RunningCalls
) -> Any:
    async def handle(request: Any, context: Context) -> Any:
        with letting_go(), server_span(method, context.invocation_metadata()) as span:
            try:
                with calls.one():
                    if isinstance(request, Malformed):
                        raise request.error()
                    return await behavior(request, context)
            except asyncio.CancelledError as gone:
                failed(span, gone, _CANCELLED)
                raise
            except Exception as failure:
                await _abort(method, context, failure, span)

    return handle


def _wrap_stream(
    method: str, behavior: Callable[[Any, Context], AsyncGenerator[Any, None]], calls: RunningCalls
) -> Any:
    # A coroutine that writes: a generator that gRPC abandons at a cancellation would be closed
    # late, and in another context.
    async def handle(request: Any, context: Context) -> None:
        with letting_go(), server_span(method, context.invocation_metadata()) as span:
            try:
                with calls.one():
                    if isinstance(request, Malformed):
                        raise request.error()
                    async with aclosing(behavior(request, context)) as responses:
                        async for response in responses:
                            await context.write(response)
            except asyncio.CancelledError as gone:
                failed(span, gone, _CANCELLED)
                raise
            except Exception as failure:
                await _abort(method, context, failure, span)

    return handle


async def _abort(method: str, context: Context, failure: Exception, span: Span) -> None:
    if isinstance(failure, grpc.aio.AbortError):
        failed(span, failure, _number_of(context.code()))
        raise failure
    if isinstance(failure, grpc.aio.InternalError):
        # What cannot be sent has no receiver any more.
        failed(span, failure, _CANCELLED)
        raise asyncio.CancelledError
    if not isinstance(failure, HeadwaterError):
        logger.error("%s failed", method, exc_info=failure)
        failure = InternalError(f"{method} failed by a fault of ours: {failure!r}; see the log")
    failed(span, failure, code_of(failure).value[0])
    await end_with(method, context, failure)


def _number_of(code: grpc.StatusCode | int) -> int:
    """gRPC says StatusCode and, once a call is aborted, gives a number."""
    return code if isinstance(code, int) else int(code.value[0])
