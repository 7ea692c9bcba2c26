"""Whether a process still answers, asked over and over without waiting for it.

A process that was stopped, or hangs, keeps its port: the kernel accepts connections for it, and
only the lack of an answer gives it away. One that refuses connections is starting or dead, which
others find out.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.rpc.channel import open_blocking_channel
from headwater.rpc.link import PLAIN

if TYPE_CHECKING:
    from typing import Any

    from headwater.rpc.link import Link

ASK_SECONDS = 3.0
_CONNECT_SECONDS = 0.5
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Pulse:
    """Asks for the health of the process at `address`; whatever it answers, it lives."""

    def __init__(
        self, address: str, link: Link = PLAIN, *, ask_seconds: float = ASK_SECONDS
    ) -> None:
        self._address = address
        self._channel = open_blocking_channel(address, link)
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._ask_seconds = ask_seconds
        self._call: Any = None
        self._next_ask = 0.0
        # Questions in a row that were left without an answer. Their number counts, not the time
        # since the last answer: this process may have been stopped itself.
        self.num_unanswered = 0

    def look(self) -> None:
        """Takes note of an answer, and asks again when it is time."""
        if self._call is not None:
            if not self._call.done():
                return
            # Without an answer gRPC gives up on the call, or on its connection before that.
            has_no_answer = self._call.code() in _NO_ANSWER
            is_silent = has_no_answer and _accepts_connections(self._address)
            self.num_unanswered = self.num_unanswered + 1 if is_silent else 0
            self._call = None
        if time.monotonic() >= self._next_ask:
            self._next_ask = time.monotonic() + self._ask_seconds
            request = health_pb2.HealthCheckRequest()
            self._call = self._stub.Check.future(request, timeout=self._ask_seconds)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


def _accepts_connections(address: str) -> bool:
    """Whether the kernel takes a connection for a process; a full queue is as good as one."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
            return True
    except TimeoutError:
        return True
    except OSError:
        return False
