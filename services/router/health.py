"""Follows an engine's health, for as long as the router lives and however often the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.rpc.streams import received

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Short, for a restarted engine serves within seconds; the channel has its own back-off besides.
_RETRY_SECONDS = 0.2


class HealthWatch:
    """Whether one service says SERVING; false as long as nothing is known."""

    def __init__(self, name: str, channel: grpc.aio.Channel, service_name: str) -> None:
        self._name = name
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._request = health_pb2.HealthCheckRequest(service=service_name)
        self._on_change: Callable[[], None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.is_serving = False

    def start(self, on_change: Callable[[], None]) -> None:
        """Begins to watch; `on_change` is called after each change of `is_serving`."""
        self._on_change = on_change
        self._watching = asyncio.create_task(self._watch(), name=f"health of {self._name}")

    async def stop(self) -> None:
        """Ends the watch."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._follow()
            self._set(is_serving=False)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self) -> None:
        call = self._stub.Watch(self._request, wait_for_ready=True)
        async with aclosing(received(call)) as replies:
            async for reply in replies:
                self._set(is_serving=reply.status == health_pb2.HealthCheckResponse.SERVING)

    def _set(self, *, is_serving: bool) -> None:
        if is_serving == self.is_serving:
            return
        self.is_serving = is_serving
        logger.info("%s is %s", self._name, "serving" if is_serving else "not serving")
        if self._on_change is not None:
            self._on_change()
