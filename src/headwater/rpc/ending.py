"""How a call ends with an error: with its status, unless nobody is there to be told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc_status import rpc_status

from headwater.wire.status import status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.errors import HeadwaterError

logger = logging.getLogger(__name__)


async def end_with(
    method: str, context: grpc.aio.ServicerContext[Any, Any], error: HeadwaterError
) -> NoReturn:
    """Sends the status of `error`, and ends the handler by raising AbortError or CancelledError."""
    if not _has_left(context):
        try:
            await context.abort_with_status(rpc_status.to_status(status_of(error)))
        except grpc.aio.InternalError:
            logger.debug("%s: the caller left while its status was sent", method)
    # To return would have gRPC send a status of its own, to nobody.
    raise asyncio.CancelledError


@contextlib.contextmanager
def letting_go() -> Iterator[None]:
    """Around a handler: what it was called with is free when it ends with an error, and not later.

    grpcio keeps the AbortError with the call, and raises it again where the handler returns. Its
    traceback would keep the handler's frames, and they the call and the request: a circle that only
    the garbage collector opens, which counts objects and does not see that some have megabytes.
    """
    try:
        yield
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None


def _has_left(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the call has ended for its caller.

    A status that can be sent no more would cost its memory for good; see headwater.rpc.streams.
    """
    left = context.time_remaining()
    return context.cancelled() or (left is not None and left <= 0)
