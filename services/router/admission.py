"""Who may start: a bounded, first-come first-served line before the engines.

Owns the counts of requests running and waiting. A request is admitted when fewer than
`max_running` run and the KV pool has room for it; only the first in line may ask for room, so
that a large request is not overtaken for ever by small ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headwater.costs import FadingMean
from headwater.errors import DeadlineError, KvExhaustedError, QueueFullError, ResourceError
from headwater.services.router.policy import Queue

_Room = TypeVar("_Room")

_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000
_FIRST_GUESS_SECONDS = 1.0


class Admission:
    """The line. Each successful `enter` is to be followed by one `leave`."""

    def __init__(self, *, max_running: int, max_waiting: int, max_wait_seconds: float) -> None:
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._first_in_line = asyncio.Lock()
        self._place_freed = asyncio.Event()
        self._held_seconds = FadingMean()
        self._is_pool_full = False
        self.num_running = 0
        self.num_waiting = 0

    @property
    def queue(self) -> Queue:
        """The line as it is now."""
        is_full = self._is_pool_full or self.num_running >= self.max_running
        held_seconds = self._held_seconds.value
        return Queue(self.num_running, self.num_waiting, self.max_running, is_full, held_seconds)

    @property
    def queue_behind_none(self) -> Queue:
        """The line as one sees it who holds the last place taken."""
        return dataclasses.replace(
            self.queue, num_running=self.num_running - 1, num_waiting=0, is_full=False
        )

    async def enter(self, reserve: Callable[[], Awaitable[_Room]], deadline: float | None) -> _Room:
        """Waits for a place, then for `reserve` to find room, and returns what it gave.

        Raises QueueFullError at once when the line is full, DeadlineError when `deadline` (a
        time.monotonic() value) passes, ResourceError after the longest wait allowed.
        """
        if self.num_running + self.num_waiting >= self.max_running + self._max_waiting:
            raise QueueFullError(
                f"the router holds {self.num_running} running and {self.num_waiting} waiting "
                f"requests, as many as it may; try again in {self._retry_after_ms()} ms",
                self._retry_after_ms(),
            )
        give_up = time.monotonic() + self._max_wait_seconds
        limit = give_up if deadline is None else min(give_up, deadline)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(limit - time.monotonic()), self._first_in_line:
                while self.num_running >= self.max_running:
                    await self._place_free(None)
                room = await self._wait_for_room(reserve)
                self.num_running += 1
                return room
        except TimeoutError:
            if limit == deadline:
                raise DeadlineError(
                    "the request's deadline passed while it waited in the router's queue"
                ) from None
            raise ResourceError(
                f"no room came free within {self._max_wait_seconds:g} s; the engines are "
                f"overloaded, try again in {self._retry_after_ms()} ms",
                self._retry_after_ms(),
            ) from None
        finally:
            self.num_waiting -= 1

    def leave(self, held_seconds: float | None) -> None:
        """Gives the place back after `held_seconds`; None when it was not used."""
        self.num_running -= 1
        if held_seconds is not None:
            self._held_seconds.observe(held_seconds)
        self._place_freed.set()

    async def room(self, reserve: Callable[[], Awaitable[_Room]], deadline: float | None) -> _Room:
        """Waits for room, for a request that has its place already.

        Raises DeadlineError when `deadline` passes.
        """
        left = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._wait_for_room(reserve)
        except TimeoutError:
            raise DeadlineError(
                "the request's deadline passed while it waited for KV blocks"
            ) from None

    async def _wait_for_room(self, reserve: Callable[[], Awaitable[_Room]]) -> _Room:
        while True:
            self._place_freed.clear()
            try:
                room = await reserve()
                self._is_pool_full = False
                return room
            except KvExhaustedError as full:
                self._is_pool_full = True
                # Room comes with the end of a request of ours, or of somebody else's.
                await self._place_free(full.retry_after_ms / 1000)

    async def _place_free(self, timeout_seconds: float | None) -> None:
        """Waits until a request leaves, or for the time given."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._place_freed.wait()
        except TimeoutError:
            return
        self._place_freed.clear()

    def _retry_after_ms(self) -> int:
        """When a place should come free: the time one is held, spread over the places."""
        held_seconds = self._held_seconds.value or _FIRST_GUESS_SECONDS
        estimate = int(1000 * held_seconds / self.max_running)
        return min(max(estimate, _MIN_RETRY_MS), _MAX_RETRY_MS)
