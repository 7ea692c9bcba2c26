"""A TCP proxy that knows where HTTP/2 frames begin: it can hold the n-th call, and cut the line.

Frames as in RFC 9113, section 4.1: a length of 24 bits, a type, flags, a stream id, the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA, HEADERS = 0, 1
_FRAME_HEADER_BYTES = 9
# What a client sends before its first frame (RFC 9113, section 3.4).
_PREFACE_BYTES = 24


class Direction:
    """The bytes that go one way, over all connections."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._kind: int | None = None
        self._left = 0
        self.held = asyncio.Event()

    def hold(self, kind: int, *, skip: int = 0) -> None:
        """Lets `skip` frames of a kind pass and holds everything from the next one on."""
        self._kind, self._left = kind, skip
        self.held.clear()

    def release(self) -> None:
        """Lets everything pass again."""
        self._kind = None
        self._open.set()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, preface_bytes: int
    ) -> None:
        """Copies one connection until its end."""
        frames = _Frames(preface_bytes)
        while data := await reader.read(1 << 16):
            for kind, piece in frames.split(data):
                if kind is not None and kind == self._kind:
                    if self._left == 0:
                        self._kind = None
                        self._open.clear()
                        self.held.set()
                    self._left -= 1
                await self._open.wait()
                if writer.is_closing():
                    return
                writer.write(piece)
            await writer.drain()


class _Frames:
    """Cuts a stream of bytes at frame borders, wherever the reads end."""

    def __init__(self, preface_bytes: int) -> None:
        self._buffer = b""
        self._payload_left = preface_bytes

    def split(self, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Yields (type, bytes) with each frame's header, and (None, bytes) for what follows it."""
        self._buffer += data
        while self._buffer:
            if self._payload_left:
                piece = self._buffer[: self._payload_left]
                self._payload_left -= len(piece)
                kind = None
            elif len(self._buffer) >= _FRAME_HEADER_BYTES:
                piece = self._buffer[:_FRAME_HEADER_BYTES]
                self._payload_left = int.from_bytes(piece[:3], "big")
                kind = piece[3]
            else:
                return
            self._buffer = self._buffer[len(piece) :]
            yield kind, piece


class Proxy:
    """Listens on a port of its own and passes everything on to `target` (host:port)."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests = Direction()
        self.replies = Direction()
        self.address = ""

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    def cut(self) -> None:
        """Resets all connections; new ones are taken at once."""
        for writer in self._writers:
            writer.transport.abort()

    def release(self) -> None:
        """Lets everything pass again, both ways."""
        self.requests.release()
        self.replies.release()

    async def close(self) -> None:
        """Cuts everything and stops listening."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        host, _, port = self._target.rpartition(":")
        try:
            target_reader, target_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            target_writer = None
        try:
            if target_writer is not None:
                self._writers.add(target_writer)
                await self._join(reader, writer, target_reader, target_writer)
        finally:
            # An end on one side is the end of both, as abrupt as it was.
            for each in (writer, target_writer):
                if each is not None:
                    each.transport.abort()
                    self._writers.discard(each)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target_reader: asyncio.StreamReader,
        target_writer: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.create_task(self.requests.pump(reader, target_writer, _PREFACE_BYTES)),
            asyncio.create_task(self.replies.pump(target_reader, writer, 0)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for pump in pumps:
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await pump
