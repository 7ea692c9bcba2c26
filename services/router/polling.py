"""Asks the engines, again and again, what they have measured of themselves."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.services.router.engines import DecodeEngine, PrefillEngine
    from headwater.services.router.outlook import Outlook

logger = logging.getLogger(__name__)

# Costs change slowly; what is under way the router knows without asking.
_POLL_SECONDS = 0.5


class LoadPoller:
    """Keeps an outlook up to date from `start` to `stop`."""

    def __init__(self, outlook: Outlook, engines: Sequence[PrefillEngine | DecodeEngine]) -> None:
        self._outlook = outlook
        self._engines = engines
        self._polling: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to ask."""
        self._polling = [
            asyncio.create_task(self._poll(engine), name=f"load of {engine.name}")
            for engine in self._engines
        ]

    async def stop(self) -> None:
        """Ends it."""
        for task in self._polling:
            task.cancel()
        if self._polling:
            await asyncio.wait(self._polling)

    async def _poll(self, engine: PrefillEngine | DecodeEngine) -> None:
        while True:
            if engine.is_serving:
                try:
                    self._outlook.told(await engine.load())
                except HeadwaterError as error:
                    # The last answer stays good enough; health is watched elsewhere.
                    logger.debug("%s did not tell its load: %s", engine.name, error)
            await asyncio.sleep(_POLL_SECONDS)
