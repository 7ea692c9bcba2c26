"""Reading a server's stream so that nothing is lost when the reader gives up.

grpcio 1.85 frees what an operation holds only after it has waited for the operation's end
(`execute_batch` in cygrpc): a read that is cancelled under way keeps its 80 bytes, and its message
if one comes, for ever. So here reads are never cancelled: the call is, and its last read then ends
by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import grpc

Message = TypeVar("Message")

# More than this many messages wait in gRPC, whose flow control slows the server down.
_READ_AHEAD = 16
_END = object()


async def received(call: grpc.aio.UnaryStreamCall[Any, Message]) -> AsyncGenerator[Message, None]:
    """The messages of a call that is this generator's own: it cancels the call when it is closed.

    Raises grpc.aio.AioRpcError when the call fails.
    """
    come: asyncio.Queue[Any] = asyncio.Queue(_READ_AHEAD)
    reading = asyncio.create_task(_read(call, come))
    try:
        while (message := await come.get()) is not _END:
            yield message
        await reading
    finally:
        call.cancel()
        while not come.empty():  # room for what the reader may still hold
            come.get_nowait()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()  # it was raised above, or nobody wants it any more


async def _read(call: grpc.aio.UnaryStreamCall[Any, Any], come: asyncio.Queue[Any]) -> None:
    try:
        async for message in call:
            await come.put(message)
    finally:
        await come.put(_END)
