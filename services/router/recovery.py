"""What a request does when an engine it needs goes away: wait for it, within bounds, and go on."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from opentelemetry import trace

from headwater.errors import UnavailableError
from headwater.telemetry.metrics import record_recovery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.services.router.engines import Engine

logger = logging.getLogger(__name__)

# A dead engine may still count as serving until its connection is known to be lost.
_SETTLE_SECONDS = 0.2
_POLL_SECONDS = 0.05


class Recovery:
    """The patience of one request; it starts anew whenever the request gets on."""

    def __init__(
        self, request_id: str, engines: Sequence[Engine], seconds: float, deadline: float | None
    ) -> None:
        self._request_id = request_id
        self._engines = engines
        self._seconds = seconds
        self._deadline = deadline
        self._lost_at: float | None = None

    def progressed(self) -> None:
        """The request got on: the next loss has the whole time again."""
        self._lost_at = None

    async def wait(self, lost: UnavailableError) -> None:
        """Returns when all engines serve again. Raises `lost` when they do not in time."""
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        limit = self._lost_at + self._seconds
        if self._deadline is not None:
            limit = min(limit, self._deadline)
        if now >= limit:
            raise lost
        logger.warning("request %s waits to go on: %s", self._request_id, lost)
        record_recovery()
        trace.get_current_span().add_event("engine_lost")
        await asyncio.sleep(_SETTLE_SECONDS)
        while not all(engine.is_serving for engine in self._engines):
            if time.monotonic() >= limit:
                raise lost
            await asyncio.sleep(_POLL_SECONDS)
