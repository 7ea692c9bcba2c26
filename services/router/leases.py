"""Keeps the leases of running requests alive, all of them with one call per beat.

The engines find out by themselves when a lease ends early, so a failed beat only needs a line in
the log: it is repeated well before the lease runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.services.router.engines import DecodeEngine, Lease

logger = logging.getLogger(__name__)

# Two beats may fail before a lease ends.
_BEATS_PER_TTL = 3


class LeaseKeeper:
    """Renews leases for as long as they are in use."""

    def __init__(self, decode: DecodeEngine) -> None:
        self._decode = decode
        self._leases: dict[tuple[int, int], Lease] = {}
        self._beating: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def keeping(self, lease: Lease) -> Iterator[None]:
        """Renews `lease` inside the block."""
        key = (lease.epoch, lease.id)
        self._leases[key] = lease
        if self._beating is None or self._beating.done():
            # It outlives this request, so it must not be a part of its trace.
            self._beating = asyncio.create_task(
                self._beat(), name="lease heartbeats", context=contextvars.Context()
            )
        try:
            yield
        finally:
            self._leases.pop(key, None)

    async def stop(self) -> None:
        """Ends the heartbeats."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])

    async def _beat(self) -> None:
        while self._leases:
            shortest = min(lease.ttl_seconds for lease in self._leases.values())
            await asyncio.sleep(shortest / _BEATS_PER_TTL)
            by_epoch: defaultdict[int, list[int]] = defaultdict(list)
            for epoch, lease_id in self._leases:
                by_epoch[epoch].append(lease_id)
            for epoch, lease_ids in by_epoch.items():
                await self._renew(epoch, lease_ids)

    async def _renew(self, epoch: int, lease_ids: list[int]) -> None:
        try:
            expired = await self._decode.renew(epoch, lease_ids)
        except HeadwaterError as error:
            logger.warning("leases %s of epoch %d were not renewed: %s", lease_ids, epoch, error)
            return
        for lease_id in expired:
            if self._leases.pop((epoch, lease_id), None) is not None:
                logger.warning("lease %d of epoch %d ended before its request", lease_id, epoch)
