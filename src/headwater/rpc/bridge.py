"""Carries events from an engine's thread into the event loop of a servicer."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from headwater.errors import HeadwaterError

Event = TypeVar("Event")


class EventBridge(Generic[Event]):
    """Made in the event loop; `emit` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | HeadwaterError] = asyncio.Queue()

    def emit(self, event: Event | HeadwaterError) -> None:
        """Hands an event over; after an error nothing more is expected."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> Event:
        """The next event. Raises the error that was handed over in its place."""
        event = await self._events.get()
        if isinstance(event, HeadwaterError):
            raise event
        return event
