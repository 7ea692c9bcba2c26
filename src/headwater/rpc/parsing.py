"""Requests that cannot be parsed: what gRPC would answer with UNKNOWN is the caller's fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from headwater.errors import InvalidRequestError, NotOfferedError
from headwater.rpc.ending import end_with, letting_go

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Malformed:
    """Stands for a request that is not parsed, so that the handler can say so."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def error(self) -> InvalidRequestError:
        return InvalidRequestError("request", self._problem)


def forgiving(deserialize: Callable[[bytes], Any], max_bytes: int) -> Callable[[bytes], Any]:
    """Without it gRPC answers bytes that are no message, or no UTF-8, with UNKNOWN.

    gRPC's own limit names no setting, and lies higher.
    """

    def parse(data: bytes) -> Any:
        if len(data) > max_bytes:
            return Malformed(
                f"has {len(data)} bytes, and limits.message_bytes allows {max_bytes}; send less"
            )
        try:
            return deserialize(data)
        except DecodeError as error:
            return Malformed(f"is not a valid message: {error}")

    return parse


def guarded(method: str, handler: Any, max_bytes: int) -> Any:
    """A handler of gRPC's own services, of any of the three kinds that they have.

    Theirs would answer such a request, and a method that they only declare, with UNKNOWN, and write
    a traceback to the log.
    """

    async def unary(request: Any, context: Any) -> Any:
        with letting_go():
            await _refuse_malformed(method, request, context)
            try:
                return await (handler.unary_unary or handler.unary_stream)(request, context)
            except NotImplementedError:
                await end_with(method, context, NotOfferedError(f"{method} is not offered"))

    async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            await _refuse_malformed(method, request, context)
            yield request

    async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        with letting_go():
            async for response in handler.stream_stream(checked(requests, context), context):
                yield response

    if handler.unary_unary is not None:
        make: Any = grpc.unary_unary_rpc_method_handler
    elif handler.unary_stream is not None:
        make = grpc.unary_stream_rpc_method_handler
    else:
        make = grpc.stream_stream_rpc_method_handler
    return make(
        unary if handler.stream_stream is None else stream,
        request_deserializer=forgiving(handler.request_deserializer, max_bytes),
        response_serializer=handler.response_serializer,
    )


async def _refuse_malformed(method: str, request: Any, context: Any) -> None:
    if isinstance(request, Malformed):
        await end_with(method, context, request.error())
