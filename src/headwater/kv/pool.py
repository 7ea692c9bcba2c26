"""The owner's side of the KV pool: which blocks and slots are free, and which leases live.

Used by one thread at a time (the decode process's event loop). Owns no tensors: what lies in the
blocks is the business of headwater.kv.pages.

A lease may end while a prefill process still writes under it: a stopped process cannot be asked.
So each slot has a generation word and a writer lock in the segment. Ending a lease first changes
the word; the slot and its blocks are given out again only when nobody holds the writer lock, which
the kernel frees when a writer dies. A writer takes the lock before it looks at the word.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import (
    KvExhaustedError,
    LeaseError,
    PromptTooLongError,
    StaleEpochError,
)
from headwater.kv.lease import KvLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headwater.kv.layout import KvLayout
    from headwater.shm import Segment

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holding:
    lease: KvLease
    request_id: str
    expires_at: float
    is_pinned: bool = False


class KvPool:
    """Leases blocks of one segment. `clock` counts seconds; tests give their own."""

    def __init__(
        self,
        segment: Segment,
        layout: KvLayout,
        *,
        ttl_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._segment = segment
        self._handle = segment.handle
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._free_blocks = deque(range(layout.num_blocks))
        self._free_slots = deque(range(layout.num_slots))
        self._holdings: dict[int, _Holding] = {}
        self._quarantine: list[KvLease] = []
        self._last_generation = 0

    @property
    def epoch(self) -> int:
        """Epoch of the pool's segment."""
        return self._handle.epoch

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a lease could get now."""
        return len(self._free_blocks)

    @property
    def num_leases(self) -> int:
        """Leases alive."""
        return len(self._holdings)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of ended leases that a writer may still hold."""
        return sum(len(lease.block_ids) for lease in self._quarantine)

    def reserve(self, request_id: str, prompt_tokens: int, max_new_tokens: int) -> KvLease:
        """Leases room for prompt and answer.

        Raises PromptTooLongError when the pool could never hold it and KvExhaustedError when it
        cannot now.
        """
        # The last generated token is never attended to, so it needs no room.
        num_tokens = prompt_tokens + max_new_tokens - 1
        num_blocks = self.layout.blocks_for(num_tokens)
        if num_blocks > self.layout.num_blocks:
            raise PromptTooLongError(
                "prompt_tokens",
                f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones need {num_blocks} KV "
                f"blocks, the pool has {self.layout.num_blocks}; ask for less or raise "
                "kv.pool_tokens",
            )
        self.sweep()
        if num_blocks > len(self._free_blocks) or not self._free_slots:
            raise KvExhaustedError(
                f"the KV pool has {len(self._free_blocks)} of {self.layout.num_blocks} blocks and "
                f"{len(self._free_slots)} of {self.layout.num_slots} slots free, the request needs "
                f"{num_blocks} blocks; try again later or raise kv.pool_tokens"
            )
        self._last_generation += 1
        slot = self._free_slots.popleft()
        lease = KvLease(
            lease_id=self._last_generation,
            segment=self._handle,
            layout=self.layout,
            slot=slot,
            generation=self._last_generation,
            block_ids=tuple(self._free_blocks.popleft() for _ in range(num_blocks)),
            cached_tokens=0,
            ttl_ms=self._ttl_ms,
        )
        self._segment.store_u64(self.layout.generation_offset(slot), lease.generation)
        self._holdings[lease.lease_id] = _Holding(lease, request_id, self._expiry())
        return lease

    def renew(self, epoch: int, lease_ids: Iterable[int]) -> list[int]:
        """Extends leases; returns those that are not alive. Raises StaleEpochError."""
        self._check_epoch(epoch)
        self.sweep()
        expired = []
        for lease_id in lease_ids:
            holding = self._holdings.get(lease_id)
            if holding is None:
                expired.append(lease_id)
            else:
                holding.expires_at = self._expiry()
        return expired

    def pin(self, epoch: int, lease_id: int) -> KvLease:
        """Takes a prefilled lease for generation; it does not expire until released.

        Raises StaleEpochError, or LeaseError when it is not alive, is pinned already or its prompt
        is not complete.
        """
        self._check_epoch(epoch)
        self.sweep()
        holding = self._holdings.get(lease_id)
        if holding is None:
            raise LeaseError(f"lease {lease_id}: not alive; it was released or it expired")
        if holding.is_pinned:
            raise LeaseError(f"lease {lease_id}: a generation uses it already")
        lease = holding.lease
        if self._segment.load_u64(self.layout.complete_offset(lease.slot)) != lease.generation:
            raise LeaseError(f"lease {lease_id}: its prompt is not computed; call Prefill first")
        holding.is_pinned = True
        return lease

    def release(self, epoch: int, lease_ids: Iterable[int]) -> None:
        """Ends leases, except those that a generation uses: it ends them itself, with `finish`.

        Unknown ones, and those of older epochs, are gone already.
        """
        if epoch != self.epoch:
            return
        for lease_id in lease_ids:
            holding = self._holdings.get(lease_id)
            if holding is not None and not holding.is_pinned:
                self._end(holding)
        self._drain_quarantine()

    def finish(self, lease: KvLease) -> None:
        """Ends a lease taken with `pin`."""
        self._end(self._holdings[lease.lease_id])
        self._drain_quarantine()

    def sweep(self) -> None:
        """Ends leases whose time is up and takes back what no writer holds any more."""
        now = self._clock()
        late = [h for h in self._holdings.values() if not h.is_pinned and h.expires_at <= now]
        for holding in late:
            logger.warning(
                "lease %d of request %s expired", holding.lease.lease_id, holding.request_id
            )
            self._end(holding)
        self._drain_quarantine()

    def _expiry(self) -> float:
        return self._clock() + self._ttl_ms / 1000

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError(
                f"epoch {epoch}: the KV pool is now of epoch {self.epoch}; older leases are gone"
            )

    def _end(self, holding: _Holding) -> None:
        lease = holding.lease
        del self._holdings[lease.lease_id]
        self._last_generation += 1
        self._segment.store_u64(self.layout.generation_offset(lease.slot), self._last_generation)
        self._quarantine.append(lease)

    def _drain_quarantine(self) -> None:
        held = []
        for lease in self._quarantine:
            if self._segment.is_slot_locked(lease.slot):
                held.append(lease)
            else:
                self._free_slots.append(lease.slot)
                self._free_blocks.extend(lease.block_ids)
        self._quarantine = held
