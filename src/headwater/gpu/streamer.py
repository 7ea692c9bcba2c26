"""Brings weights to the device ahead of their use, round and round, through rings.

Owns the order of copies and what is where. Items are taken and released in their one order, by a
single thread; copies run ahead as far as slots are free, over the end of the order into the next
round: when a sweep ends, the first items of the next one are on their way. A slot is overwritten
after what read it, and read after what filled it; both are waits of queues, never of the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headwater.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from headwater.gpu.ring import Ring, Slot
    from headwater.gpu.streams import Queues


@dataclass(frozen=True, slots=True)
class StreamItem:
    """Bytes that are copied and used together: `parts` are flat UINT8 on the host.

    `key` is its name, `ring` the ring it goes through, and `range_index` the host range that
    holds it; see HostRanges.
    """

    key: Hashable
    parts: tuple[Tensor, ...]
    ring: int = 0
    range_index: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes copied."""
        return sum(part.numel() for part in self.parts)


class HostRanges(Protocol):
    """Host memory that becomes fit for fast copies, range by range, in the order of use."""

    def is_ready(self, index: int) -> bool:
        """Whether the range can be copied from."""
        ...

    def wait(self, index: int) -> None:
        """Waits for it. Raises ResourceError when it will never be."""
        ...


class ReadyRanges:
    """Memory that is fit as it is."""

    def is_ready(self, index: int) -> bool:  # noqa: ARG002
        """See HostRanges."""
        return True

    def wait(self, index: int) -> None:
        """See HostRanges."""


class Streamer:
    """Items in their order of use, each in the ring that it names.

    `share`, in (0, 1], is how much of the time copies take that are queued from now on.
    """

    def __init__(
        self,
        items: Sequence[StreamItem],
        rings: Sequence[Ring],
        queues: Queues,
        ranges: HostRanges | None = None,
    ) -> None:
        self._items = items
        self._rings = rings
        self.queues = queues
        self._ranges = ranges or ReadyRanges()
        self._places = {item.key: place for place, item in enumerate(items)}
        # The number of each item among those of its ring.
        counts = [0] * len(rings)
        self._numbers = []
        for item in items:
            self._numbers.append(counts[item.ring])
            counts[item.ring] += 1
        self._next_copy = 0
        self._next_use = 0
        self._loaded: deque[Slot] = deque()
        self._in_use: deque[Slot] = deque()
        self.copied_bytes = 0
        self.share = 1.0

    @property
    def occupancy(self) -> float:
        """Of the last ring, the experts': how far copies are ahead. May be asked by any thread."""
        return self._rings[-1].occupancy

    def take(self, key: Hashable) -> list[Tensor]:
        """The parts of the item `key` on the device, UINT8, valid for computation queued after.

        To be released in the same order. An item out of the order drops what was copied ahead.
        """
        place = self._places[key]
        if self._items[self._next_use].key != key:
            self._restart(place)
        while not self._loaded:
            self._ranges.wait(self._items[self._next_copy].range_index)
            if not self._copy_next():
                raise InternalError(f"streaming: all slots are in use when {key} is needed")
        slot = self._loaded.popleft()
        assert slot.filled is not None
        self.queues.computing_waits(slot.filled)
        self._in_use.append(slot)
        self._next_use = (self._next_use + 1) % len(self._items)
        self._run_ahead()
        return slot.parts

    def release(self) -> None:
        """The item taken first has been used by what is queued so far; its slot may be refilled."""
        slot = self._in_use.popleft()
        slot.emptied = self.queues.mark_computed()
        slot.is_free = True
        self._run_ahead()

    def reset(self) -> None:
        """Gives back what is taken and was not released, because its use was broken off."""
        while self._in_use:
            slot = self._in_use.popleft()
            slot.emptied = self.queues.mark_computed()
            slot.is_free = True

    def prefetch(self) -> None:
        """Begins to copy, as far as slots and ready host memory reach."""
        self._run_ahead()

    def forget(self) -> None:
        """The rings' memory has been, or will be, another streamer's on the same queues."""
        self._restart(0)
        for ring in self._rings:
            ring.forget()
        # Whatever reads the memory does so before it is written to again.
        self.queues.copying_waits(self.queues.mark_computed())

    def _run_ahead(self) -> None:
        while len(self._loaded) + len(self._in_use) < len(self._items):
            if not self._ranges.is_ready(self._items[self._next_copy].range_index):
                return
            if not self._copy_next():
                return

    def _copy_next(self) -> bool:
        """Queues the next item's copy; False when its slot is not free."""
        place = self._next_copy
        item, ring = self._items[place], self._rings[self._items[place].ring]
        slot = ring.slot_for(self._numbers[place])
        if not slot.is_free:
            return False
        ring.advance()
        slot.is_free = False
        # A slot that still holds the item, because there is one for each, needs no copy.
        if slot.content != place:
            if slot.emptied is not None:
                self.queues.copying_waits(slot.emptied)
            slot.parts = ring.split(slot, [part.numel() for part in item.parts])
            self.queues.copy(slot.parts, item.parts, self.share)
            slot.filled = self.queues.mark_copied()
            slot.content = place
            self.copied_bytes += item.num_bytes
        self._loaded.append(slot)
        self._next_copy = (place + 1) % len(self._items)
        return True

    def _restart(self, place: int) -> None:
        """Begins anew at `place`: what was copied ahead is dropped, what was taken is released."""
        self.reset()
        while self._loaded:
            # Nobody read it; the next copy into it comes after this one on the same queue.
            self._loaded.popleft().is_free = True
        self._next_copy = self._next_use = place
