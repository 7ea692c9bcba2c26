"""Start, ready, drain, stop: the life of a gRPC server, the same for all three services.

Owns the server, its health and its reflection; the servicers and what they serve are the
caller's.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from headwater.errors import ConfigError
from headwater.rpc.calls import RunningCalls
from headwater.rpc.interceptor import ErrorAndTraceInterceptor
from headwater.rpc.limits import max_rpcs, server_options
from headwater.rpc.link import PLAIN
from headwater.rpc.tls import check_listen, is_on, server_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headwater.rpc.link import Link
    from headwater.rpc.tls import Kind

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.2

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class Registration:
    """A servicer, how to add it to a server, and the full name of its service."""

    add: Callable[[Any, grpc.aio.Server], None]
    servicer: Any
    service_name: str


class Server:
    """A gRPC server that is live from `start` and ready once told so."""

    def __init__(
        self,
        listen: str,
        registrations: Sequence[Registration],
        link: Link = PLAIN,
        kind: Kind = "engine",
        plain_listen: str = "",
    ) -> None:
        """`plain_listen` is a second address, for callers that cannot speak TLS."""
        self._listen = listen
        self._plain_listen = plain_listen
        self._tls = link.tls
        self._kind: Kind = kind
        self._names = tuple(registration.service_name for registration in registrations)
        self._calls = RunningCalls(link.limits.concurrent_calls)
        self._server = grpc.aio.server(
            interceptors=(ErrorAndTraceInterceptor(self._calls, link.limits.message_bytes),),
            options=server_options(link.limits),
            maximum_concurrent_rpcs=max_rpcs(link.limits),
        )
        self._health = HealthServicer()
        for registration in registrations:
            registration.add(registration.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._names, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> int:
        """Binds and serves; returns the port. Health: "" SERVING, the services NOT_SERVING.

        Raises ConfigError when the address cannot be bound, lies beyond this machine without TLS,
        or a certificate cannot be used.
        """
        await self._health.set("", _SERVING)
        await self.set_ready(False)
        is_encrypted = is_on(self._tls)
        port = self._bind("listen", self._listen, is_encrypted=is_encrypted)
        if self._plain_listen:
            self._bind("plain_listen", self._plain_listen, is_encrypted=False)
        await self._server.start()
        return port

    def _bind(self, setting: str, listen: str, *, is_encrypted: bool) -> int:
        check_listen(setting, listen, self._tls, is_encrypted=is_encrypted)
        credentials = server_credentials(self._tls, self._kind) if is_encrypted else None
        try:
            if credentials is None:
                port = int(self._server.add_insecure_port(listen))
            else:
                port = int(self._server.add_secure_port(listen, credentials))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {listen}: the port is in use or not allowed; "
                f"choose another with the setting `{setting}`, or stop what uses it"
            ) from error
        how = "with TLS" if is_encrypted else "in plain text"
        logger.info("listening on %s (port %d), %s", listen, port, how)
        return port

    async def set_ready(self, is_ready: bool) -> None:
        """Tells grpc.health whether the services can be used."""
        for name in self._names:
            await self._health.set(name, _SERVING if is_ready else _NOT_SERVING)
        logger.info("%s %s", ", ".join(self._names), "SERVING" if is_ready else "NOT_SERVING")

    async def stop(self, grace_seconds: float) -> None:
        """Says NOT_SERVING, refuses new calls, lets running ones end within the grace period.

        Refused calls, and those that the grace period cuts short, end with UNAVAILABLE.
        """
        await self._health.enter_graceful_shutdown()
        if not await self._calls.drain(grace_seconds):
            logger.warning("stopping before all requests have ended, after %g s", grace_seconds)
        # What is left are calls that never end, such as those that watch our health, and the last
        # bytes of those that have just ended.
        await self._server.stop(min(grace_seconds, _FLUSH_SECONDS))


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
