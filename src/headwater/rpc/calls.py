"""Counts the calls of our own services that are under way, so that a server can end when they have.

gRPC's own grace period ends early only when every call has ended, and some never do, such as those
that watch the server's health.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from headwater.errors import ResourceError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


class RunningCalls:
    """Lives in the server's event loop."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._num_running = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One call, inside the block.

        Raises UnavailableError when the process stops, ResourceError when there are too many.
        """
        if self._is_draining:
            raise UnavailableError(
                "the process is stopping and takes no more requests; try again, or elsewhere"
            )
        if self._num_running >= self._max_running:
            raise ResourceError(
                f"{self._num_running} calls are under way, and limits.concurrent_calls allows no "
                "more; try again"
            )
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()

    async def drain(self, grace_seconds: float) -> bool:
        """Takes no more calls; waits until those under way have ended, and says whether they have.

        Returns after `grace_seconds` in any case.
        """
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        return self._idle.is_set()
