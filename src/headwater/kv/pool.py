"""The owner's side of the KV pool: which leases live, and which blocks they hold.

May be called from several threads (the event loop hands out leases, the engine grows them). Owns no
tensors: what lies in the blocks is the business of headwater.kv.pages.

A lease may end while a prefill process still writes under it: a stopped process cannot be asked.
So each slot has a generation word and a writer lock in the segment. Ending a lease first changes
the word; the slot and its blocks are given out again only when nobody holds the writer lock, which
the kernel frees when a writer dies. A writer takes the lock before it looks at the word.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import KvExhaustedError, LeaseError, PromptTooLongError, StaleEpochError
from headwater.kv.blocks import BlockEvent, BlockTable
from headwater.kv.holding import Holding
from headwater.kv.lease import KvLease
from headwater.kv.words import ended_word, forked_prompt_word, lease_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headwater.kv.layout import KvLayout
    from headwater.shm import Segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvCopies:
    """What a fork does not share: (source, target) pairs of blocks, and of slots."""

    blocks: tuple[tuple[int, int], ...]
    slots: tuple[int, int]


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
        self._lock = threading.RLock()
        self._table = BlockTable(layout.num_blocks, self._tell)
        self._listeners: list[Callable[[BlockEvent], None]] = []
        self._free_slots = deque(range(layout.num_slots))
        self._holdings: dict[int, Holding] = {}
        self._quarantine: list[Holding] = []
        self._last_number = 0
        self.cached_tokens = 0
        self.queried_tokens = 0

    @property
    def epoch(self) -> int:
        """Epoch of the pool's segment."""
        return self._handle.epoch

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a lease could get now, those with content worth keeping included."""
        return self._table.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds but whose content may be used again."""
        return self._table.num_kept

    @property
    def num_leases(self) -> int:
        """Leases alive."""
        return len(self._holdings)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of ended leases that a writer may still hold."""
        with self._lock:
            return sum(len(holding.blocks) for holding in self._quarantine)

    def reserve(
        self,
        request_id: str,
        prompt_tokens: int,
        max_new_tokens: int,
        names: Sequence[bytes] = (),
    ) -> KvLease:
        """Leases room for the prompt; `names` are those of its full blocks, for reuse.

        Raises PromptTooLongError when the pool could never hold prompt and answer, and
        KvExhaustedError when it cannot hold the prompt now.
        """
        # The last generated token is never attended to, so it needs no room.
        most_blocks = self.layout.blocks_for(prompt_tokens + max_new_tokens - 1)
        if most_blocks > self.layout.num_blocks:
            raise PromptTooLongError(
                "prompt_tokens",
                f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones need {most_blocks} "
                f"KV blocks, the pool has {self.layout.num_blocks}; ask for less or raise "
                "kv.pool_tokens",
            )
        with self._lock:
            self._sweep()
            if not self._free_slots:
                raise KvExhaustedError(
                    f"all {self.layout.num_slots} lease slots are taken; try again later or raise "
                    "kv.slots"
                )
            # Each request that generates may want a block at its next token.
            found = self._find(prompt_tokens, names)
            blocks = self._fill(prompt_tokens, found, headroom=len(self._holdings))
            if blocks is None:
                raise KvExhaustedError(
                    f"the KV pool has {self.num_free_blocks} of {self.layout.num_blocks} blocks "
                    f"free, the request needs {self.layout.blocks_for(prompt_tokens)} and "
                    f"{len(self._holdings)} are kept for requests under way; try again later or "
                    "raise kv.pool_tokens"
                )
            cached_tokens = len(found) * self.layout.block_tokens
            self.queried_tokens += prompt_tokens
            self.cached_tokens += cached_tokens
            return self._lease(request_id, blocks, cached_tokens, tuple(names[: len(found)]))

    def renew(self, epoch: int, lease_ids: Iterable[int]) -> list[int]:
        """Extends leases; returns those that are not alive. Raises StaleEpochError."""
        self._check_epoch(epoch)
        with self._lock:
            self._sweep()
            expired = []
            for lease_id in lease_ids:
                holding = self._holdings.get(lease_id)
                if holding is None:
                    expired.append(lease_id)
                else:
                    holding.expires_at = self._expiry()
            return expired

    def pin(
        self, epoch: int, lease_id: int, token_ids: Sequence[int], num_prefilled: int | None
    ) -> KvLease:
        """Takes a lease for generation; it does not expire until `finish`.

        `token_ids` are all that the request has so far. Prefill computed the first `num_prefilled`
        of them; None: the caller computes those that are not cached.

        Raises StaleEpochError, LeaseError when the lease is not alive, is pinned already or its
        prompt is not complete, and InvalidRequestError when what is cached, or what prefill
        computed, is of other tokens: whoever asks next would be given it for these.
        """
        self._check_epoch(epoch)
        with self._lock:
            self._sweep()
            holding = self._alive(lease_id)
            if holding.is_pinned:
                raise LeaseError(f"lease {lease_id}: a generation uses it already")
            if num_prefilled is not None:
                word = self._complete_word(holding.lease)
                holding.check_computed(word, token_ids[:num_prefilled])
            holding.check_reserved_for(token_ids)
            holding.is_pinned = True
            return holding.lease

    def fork(self, epoch: int, lease_id: int, prompt_tokens: int) -> tuple[KvLease, KvCopies]:
        """Another lease on the same, complete prompt.

        Full blocks are shared; the caller copies the rest before anybody uses the lease. Raises as
        `pin` and `reserve` do, and InvalidRequestError when its blocks hold no such prompt.
        """
        self._check_epoch(epoch)
        with self._lock:
            self._sweep()
            holding = self._alive(lease_id)
            word = self._complete_word(holding.lease)
            holding.check_complete(word)
            holding.check_holds(prompt_tokens)
            shared = holding.blocks[: prompt_tokens // self.layout.block_tokens]
            if not self._free_slots:
                raise KvExhaustedError(f"all {self.layout.num_slots} lease slots are taken")
            blocks = self._fill(prompt_tokens, shared, headroom=len(self._holdings))
            if blocks is None:
                raise KvExhaustedError(
                    f"the KV pool has {self.num_free_blocks} of {self.layout.num_blocks} blocks "
                    "free, too few to fork a request; try again later or raise kv.pool_tokens"
                )
            lease = self._lease(
                holding.request_id, blocks, holding.lease.cached_tokens, holding.found_names
            )
            offset = self.layout.complete_offset(lease.slot)
            self._segment.store_u64(offset, forked_prompt_word(word, lease.generation))
            tail = zip(holding.blocks[len(shared) :], blocks[len(shared) :], strict=False)
            return lease, KvCopies(tuple(tail), (holding.lease.slot, lease.slot))

    def grow(self, lease: KvLease) -> int | None:
        """One more block for a pinned lease; None when there is none."""
        with self._lock:
            if self._table.num_available == 0:
                return None
            [block] = self._table.take(1)
            self._holdings[lease.lease_id].blocks.append(block)
            return block

    def give_up_blocks(self, lease: KvLease) -> None:
        """Takes all blocks of a pinned lease away; it stays alive."""
        with self._lock:
            holding = self._holdings[lease.lease_id]
            self._table.drop(holding.blocks)
            holding.blocks = []

    def refill(
        self, lease: KvLease, num_tokens: int, names: Sequence[bytes], *, headroom: int
    ) -> tuple[list[int], int] | None:
        """Blocks again, for a pinned lease without any: the blocks, and the tokens they hold.

        None when there is no room for `num_tokens` and `headroom` blocks beside them.
        """
        with self._lock:
            found = self._find(num_tokens, names)
            blocks = self._fill(num_tokens, found, headroom=headroom)
            if blocks is None:
                return None
            self._holdings[lease.lease_id].blocks = list(blocks)
            return blocks, len(found) * self.layout.block_tokens

    def name_block(self, block: int, name: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Says that a held block is complete, so that others may use it.

        `name` is made from `parent`, the name of the block before it, and from its tokens.
        """
        with self._lock:
            self._table.name(block, name, parent, token_ids)

    def listen(self, listener: Callable[[BlockEvent], None]) -> list[BlockEvent]:
        """Tells `listener` of each change from now on; returns what is usable at this moment.

        It is called from whichever thread makes the change, with the pool locked: it must be quick
        and must not call the pool.
        """
        with self._lock:
            self._listeners.append(listener)
            return self._table.stored()

    def unlisten(self, listener: Callable[[BlockEvent], None]) -> None:
        """Ends `listen`."""
        with self._lock:
            self._listeners.remove(listener)

    def flush(self) -> tuple[int, int]:
        """Forgets all content that nobody holds.

        Returns how many blocks were forgotten, and how many stay usable because they are held.
        """
        with self._lock:
            return self._table.flush(), self._table.num_named

    def release(self, epoch: int, lease_ids: Iterable[int]) -> None:
        """Ends leases, except those that a generation uses: it ends them itself, with `finish`.

        Unknown ones, and those of older epochs, are gone already.
        """
        if epoch != self.epoch:
            return
        with self._lock:
            for lease_id in lease_ids:
                holding = self._holdings.get(lease_id)
                if holding is not None and not holding.is_pinned:
                    self._end(holding)
            self._drain_quarantine()

    def finish(self, lease: KvLease) -> None:
        """Ends a lease taken with `pin`."""
        with self._lock:
            self._end(self._holdings[lease.lease_id])
            self._drain_quarantine()

    def sweep(self) -> None:
        """Ends leases whose time is up and takes back what no writer holds any more."""
        with self._lock:
            self._sweep()

    def _tell(self, event: BlockEvent) -> None:
        for listener in self._listeners:
            listener(event)

    def _sweep(self) -> None:
        now = self._clock()
        late = [h for h in self._holdings.values() if not h.is_pinned and h.expires_at <= now]
        for holding in late:
            logger.warning(
                "lease %d of request %s expired", holding.lease.lease_id, holding.request_id
            )
            self._end(holding)
        self._drain_quarantine()

    def _find(self, num_tokens: int, names: Sequence[bytes]) -> list[int]:
        """Blocks that hold a prefix; at least the last token is left to compute."""
        most = (num_tokens - 1) // self.layout.block_tokens
        return self._table.find(names[:most])

    def _fill(self, num_tokens: int, found: Sequence[int], *, headroom: int) -> list[int] | None:
        """`found` and as many new blocks as `num_tokens` take; None when there is no room."""
        num_new = self.layout.blocks_for(num_tokens) - len(found)
        # Held first: they may be kept ones, which are counted as available until then.
        self._table.hold(found)
        if num_new + headroom > self._table.num_available:
            self._table.drop(found)
            return None
        return [*found, *self._table.take(num_new)]

    def _lease(
        self,
        request_id: str,
        blocks: list[int],
        cached_tokens: int,
        found_names: tuple[bytes, ...],
    ) -> KvLease:
        self._last_number += 1
        slot = self._free_slots.popleft()
        lease = KvLease(
            lease_id=self._last_number,
            segment=self._handle,
            layout=self.layout,
            slot=slot,
            generation=lease_word(self._last_number, slot, blocks, cached_tokens),
            block_ids=tuple(blocks),
            cached_tokens=cached_tokens,
            ttl_ms=self._ttl_ms,
        )
        self._segment.store_u64(self.layout.generation_offset(lease.slot), lease.generation)
        self._holdings[lease.lease_id] = Holding(
            lease, request_id, self._expiry(), list(blocks), found_names
        )
        return lease

    def _alive(self, lease_id: int) -> Holding:
        holding = self._holdings.get(lease_id)
        if holding is None:
            raise LeaseError(f"lease {lease_id}: not alive; it was released or it expired")
        return holding

    def _complete_word(self, lease: KvLease) -> int:
        return self._segment.load_u64(self.layout.complete_offset(lease.slot))

    def _expiry(self) -> float:
        return self._clock() + self._ttl_ms / 1000

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError(
                f"epoch {epoch}: the KV pool is now of epoch {self.epoch}; older leases are gone"
            )

    def _end(self, holding: Holding) -> None:
        lease = holding.lease
        del self._holdings[lease.lease_id]
        self._last_number += 1
        offset = self.layout.generation_offset(lease.slot)
        self._segment.store_u64(offset, ended_word(self._last_number))
        self._quarantine.append(holding)

    def _drain_quarantine(self) -> None:
        held = []
        for holding in self._quarantine:
            if self._segment.is_slot_locked(holding.lease.slot):
                held.append(holding)
            else:
                self._free_slots.append(holding.lease.slot)
                self._table.drop(holding.blocks)
        self._quarantine = held
