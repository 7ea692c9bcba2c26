"""A relay that passes a connection on a few bytes at a time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_PIECE_BYTES = 40
_PAUSE_SECONDS = 0.002


@contextlib.asynccontextmanager
async def trickling(address: str) -> AsyncIterator[str]:
    """An address that leads to `address`, slowly in both directions."""
    host, _, port = address.rpartition(":")
    connections: set[asyncio.Task[Any]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(writer), contextlib.closing(far_writer):
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            connections.discard(task)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(_PAUSE_SECONDS)
    writer.close()
