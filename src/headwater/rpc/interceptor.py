"""The one place where errors become statuses and where the caller's trace context is taken over.

Servicer methods raise HeadwaterErrors and know nothing of codes. Anything else that escapes is a
fault of ours: it is logged with its traceback and becomes INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from grpc_status import rpc_status

from headwater.errors import HeadwaterError, InternalError
from headwater.telemetry.tracing import server_span
from headwater.wire.status import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ErrorAndTraceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each of our own methods; health and reflection pass through untouched."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler of the method, wrapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _wrap_unary(method, handler.unary_unary),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_stream_rpc_method_handler(
            _wrap_stream(method, handler.unary_stream),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _wrap_unary(method: str, behavior: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    async def handle(request: Any, context: Context) -> Any:
        with server_span(method, context.invocation_metadata()):
            try:
                return await behavior(request, context)
            except Exception as failure:
                await _abort(method, context, failure)

    return handle


def _wrap_stream(method: str, behavior: Callable[[Any, Context], AsyncIterator[Any]]) -> Any:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        with server_span(method, context.invocation_metadata()):
            responses = behavior(request, context)
            try:
                async for response in responses:
                    yield response
            except Exception as failure:
                await _abort(method, context, failure)
            finally:
                # A cancelled call must end the generator now, not when it is collected.
                await responses.aclose()  # type: ignore[attr-defined]

    return handle


async def _abort(method: str, context: Context, failure: Exception) -> None:
    if isinstance(failure, grpc.aio.AbortError | asyncio.CancelledError):
        raise failure
    if not isinstance(failure, HeadwaterError):
        logger.error("%s failed", method, exc_info=failure)
        failure = InternalError(f"{method} failed by a fault of ours: {failure!r}; see the log")
    await context.abort_with_status(rpc_status.to_status(status_of(failure)))
