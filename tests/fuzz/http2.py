"""Connections that break the rules of HTTP/2 or of gRPC over it, frame by frame.

Frames as in RFC 9113, section 4.1; header blocks as literals that name themselves (RFC 7541,
section 6.2.2), so that no state is needed; gRPC's framing as its PROTOCOL-HTTP2 document says.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
_ANSWER_SECONDS = 0.15


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame; nothing about it needs to make sense."""
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream) + payload
    )


def header_block(headers: Iterable[tuple[str, bytes]]) -> bytes:
    """Headers as literals without indexing."""
    return b"".join(b"\x00" + _text(name.encode()) + _text(value) for name, value in headers)


def grpc_headers(path: str, content_type: bytes = b"application/grpc") -> list[tuple[str, bytes]]:
    """What a gRPC client sends."""
    return [
        (":method", b"POST"),
        (":scheme", b"http"),
        (":path", path.encode()),
        (":authority", b"localhost"),
        ("te", b"trailers"),
        ("content-type", content_type),
    ]


def grpc_message(data: bytes, *, is_compressed: bool = False, length: int | None = None) -> bytes:
    """A message with its prefix, which may lie."""
    return struct.pack(">BI", is_compressed, len(data) if length is None else length) + data


def _text(data: bytes) -> bytes:
    """A string literal: its length in 7 bits or more (RFC 7541, section 5.1), then itself."""
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, encoded = len(data) - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest % 128 | 128)
        rest //= 128
    return bytes((*encoded, rest)) + data


@dataclass(frozen=True, slots=True)
class Script:
    """What to send; in `pieces` of so many bytes at a time; and how to leave."""

    name: str
    data: bytes
    piece_bytes: int = 1 << 16
    leaves_by: str = "close"


def scripts(draw: Random, path: str, message: bytes) -> list[Script]:
    """One of each kind, for a method and a message that it would take."""
    start = PREFACE + frame(SETTINGS)
    opened = frame(HEADERS, END_HEADERS, 1, header_block(grpc_headers(path)))
    whole = frame(DATA, END_STREAM, 1, grpc_message(message))
    call = start + opened + whole
    cut = draw.randrange(1, len(call))
    stream = draw.choice((0, 1, 2, 3, 1 << 30, (1 << 31) - 1))

    def headers(*extra: tuple[str, bytes], replace: dict[str, bytes] | None = None) -> bytes:
        given = [(n, (replace or {}).get(n, v)) for n, v in grpc_headers(path)]
        return frame(HEADERS, END_HEADERS, 1, header_block([*given, *extra]))

    def data(payload: bytes) -> bytes:
        return start + opened + frame(DATA, END_STREAM, 1, payload)

    flood = b"".join(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) for _ in range(200))
    resets = b"".join(
        frame(HEADERS, END_HEADERS, 2 * i + 1, header_block(grpc_headers(path)))
        + frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8))
        for i in range(50)
    )
    return [
        Script("random bytes", draw.randbytes(draw.choice((1, 24, 500, 5000)))),
        Script("HTTP/1.1", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"),
        Script("TLS hello", bytes.fromhex("16030100") + draw.randbytes(300)),
        Script("nothing", b"", leaves_by=draw.choice(("close", "reset", "half"))),
        Script("random frames", start + draw.randbytes(draw.choice((9, 90, 3000)))),
        Script(
            "frame of any kind",
            start + frame(draw.randrange(256), draw.randrange(256), stream, draw.randbytes(50)),
        ),
        Script("cut anywhere", call[:cut], leaves_by=draw.choice(("close", "reset", "half"))),
        Script("byte by byte", call, piece_bytes=1),
        Script("trickled and cut", call[:cut], piece_bytes=3, leaves_by="reset"),
        Script("half-closed after headers", start + opened, leaves_by="half"),
        Script(
            "ends without a message", start + frame(HEADERS, 5, 1, header_block(grpc_headers(path)))
        ),
        Script("two messages", data(2 * grpc_message(message))),
        Script("message cut by the end", data(grpc_message(message, length=len(message) + 9))),
        Script("message of 4 GiB", data(grpc_message(message, length=0xFFFFFFFF))),
        Script("compressed, with nothing said", data(grpc_message(message, is_compressed=True))),
        Script(
            "compressed garbage",
            start
            + headers(("grpc-encoding", b"gzip"))
            + frame(DATA, END_STREAM, 1, grpc_message(message, is_compressed=True)),
        ),
        Script(
            "unknown encoding",
            start
            + headers(("grpc-encoding", b"lzma9"))
            + frame(DATA, END_STREAM, 1, grpc_message(message, is_compressed=True)),
        ),
        Script(
            "bad time-out",
            start
            + headers(("grpc-timeout", draw.choice((b"", b"-1S", b"99999999999S", b"1y", b"0n"))))
            + whole,
        ),
        Script(
            "bad trace",
            start
            + headers(
                (
                    "traceparent",
                    draw.choice(
                        (
                            b"",
                            b"00-0-0-0",
                            b"zz" * 30,
                            b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-01",
                        )
                    ),
                )
            )
            + whole,
        ),
        Script("bad binary metadata", start + headers(("x-bin", b"!!!!")) + whole),
        Script("large header", start + headers(("x-large", b"v" * 9000)) + whole),
        Script("JSON", start + headers(replace={"content-type": b"application/json"}) + whole),
        Script("no content type", start + headers(replace={"content-type": b""}) + whole),
        Script("GET", start + headers(replace={":method": b"GET"}) + whole),
        Script("no path", start + headers(replace={":path": b""}) + whole),
        Script("broken header block", start + frame(HEADERS, 5, 1, draw.randbytes(60))),
        Script("continuation of nothing", start + frame(CONTINUATION, 4, 1, draw.randbytes(9))),
        Script("data for no stream", start + frame(DATA, 1, stream, grpc_message(message))),
        Script("even stream", start + frame(HEADERS, 5, 2, header_block(grpc_headers(path)))),
        Script("padding past the end", start + opened + frame(DATA, PADDED | 1, 1, b"\xff" * 3)),
        Script("window past its limit", call + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff")),
        Script("window of zero", call + frame(WINDOW, 0, 1, bytes(4))),
        Script("settings flood", start + flood + call[len(start) :]),
        Script("ping flood", start + 200 * frame(PING, 0, 0, bytes(8)) + call[len(start) :]),
        Script("rapid reset", start + resets),
        Script("push", start + frame(PUSH, 4, 1, bytes(4) + header_block([(":path", b"/")]))),
        Script("goaway", call + frame(GOAWAY, 0, 0, bytes(8)), leaves_by="half"),
    ]


async def play(address: str, script: Script) -> str:
    """Sends it and listens a little: "closed" by the server, "answered" or "silent"."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    heard = b""
    try:
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(script.data), script.piece_bytes):
                writer.write(script.data[at : at + script.piece_bytes])
                await writer.drain()
                if script.piece_bytes < 16:
                    await asyncio.sleep(0)
            if script.leaves_by == "half":
                writer.write_eof()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                while piece := await reader.read(1 << 16):
                    heard += piece
                return "closed"
        except TimeoutError:
            # The server's own SETTINGS always come.
            return "answered" if len(heard) > 100 else "silent"
        except ConnectionError:
            return "closed"
    finally:
        if script.leaves_by == "reset":
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
