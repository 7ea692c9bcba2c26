"""Follows what a pool's prefix cache holds, for one listener in an event loop."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from headwater.kv.blocks import BlockEvent
    from headwater.kv.pool import KvPool

# What waits for a listener that is slow; one that is slower still starts anew.
MAX_PENDING = 8192
# Events in one batch, so that a message stays far below what gRPC takes.
MAX_BATCH = 1024


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Changes in order; with `is_snapshot` they replace all that was known before."""

    is_snapshot: bool
    events: tuple[BlockEvent, ...]


class KvEventFeed:
    """Use it as a context manager, inside the loop; `next` gives what happened since the last one.

    The first batch, and one after events had to be dropped, is a snapshot. A long snapshot is
    followed by the rest of it in ordinary batches.
    """

    def __init__(self, pool: KvPool, *, max_pending: int = MAX_PENDING) -> None:
        self._pool = pool
        self._max_pending = max_pending
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._lock = threading.Lock()
        self._pending: list[BlockEvent] = []
        self._is_snapshot_due = True
        self._is_overrun = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.unlisten(self._note)

    async def next(self) -> KvEventBatch:
        """Waits for a change, unless a snapshot is due."""
        while not self._is_snapshot_due:
            await self._came.wait()
            with self._lock:
                is_overrun = self._is_overrun
                if self._pending and not is_overrun:
                    return self._taken(is_snapshot=False)
                self._came.clear()
            if is_overrun:
                self._pool.unlisten(self._note)
                self._start()
        with self._lock:
            return self._taken(is_snapshot=True)

    def _start(self) -> None:
        with self._lock:
            self._pending = []
            self._is_overrun = False
            self._is_snapshot_due = True
        stored = self._pool.listen(self._note)
        with self._lock:
            # What happened since comes after what was there.
            self._pending = stored + self._pending

    def _taken(self, *, is_snapshot: bool) -> KvEventBatch:
        """The oldest events; to be called with the lock held."""
        batch, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
        self._is_snapshot_due = False
        if not self._pending and not self._is_overrun:
            self._came.clear()
        else:
            self._came.set()
        return KvEventBatch(is_snapshot, tuple(batch))

    def _note(self, event: BlockEvent) -> None:
        """Called from any thread, with the pool locked."""
        with self._lock:
            if self._is_overrun:
                return
            if len(self._pending) >= self._max_pending:
                self._is_overrun = True
                self._pending = []
            else:
                self._pending.append(event)
        self._loop.call_soon_threadsafe(self._came.set)
