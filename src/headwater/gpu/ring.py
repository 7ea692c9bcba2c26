"""A ring of equal slots in device memory, allocated once.

Owns the slots and whose turn they are; streamer.py fills and empties them. Where the ring has a
slot for every item, each item keeps its own, so that what has been copied once stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from headwater.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headwater.gpu.streams import Mark

# What every dtype and every vector load of the kernels is happy with.
ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment of parts within a slot."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Slot:
    """`content` names the item whose bytes it holds or is about to hold; None: nothing of use.

    It may be overwritten after `emptied`, and read after `filled`.
    """

    memory: Tensor
    content: int | None = None
    is_free: bool = True
    filled: Mark | None = None
    emptied: Mark | None = None
    parts: list[Tensor] = field(default_factory=list)


def ring_memory(num_slots: int, slot_bytes: int, device: torch.device) -> Tensor:
    """Device memory for so many slots, UINT8. Raises ResourceError when there is no room."""
    try:
        return torch.empty(num_slots * aligned(slot_bytes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{device}: no room for {num_slots} ring slots of {slot_bytes} bytes; lower "
            "gpu.vram_gib or free the device's memory"
        ) from error


class Ring:
    """`num_slots` slots of `slot_bytes` for `num_items` items that come round in order."""

    def __init__(self, num_items: int, slot_bytes: int, memory: Tensor) -> None:
        """As many slots as `memory`, UINT8, has room for, and items have use for."""
        self.slot_bytes = aligned(slot_bytes)
        room = memory.numel() // self.slot_bytes if self.slot_bytes else 0
        self.num_slots = min(num_items, room)
        self.is_resident = self.num_slots == num_items
        used = memory[: self.num_slots * self.slot_bytes]
        self._slots = [Slot(m) for m in used.view(self.num_slots, self.slot_bytes).unbind()]
        self._next = 0

    @property
    def occupancy(self) -> float:
        """Share of the slots that hold something, or are being filled, and are not used up yet."""
        return sum(not slot.is_free for slot in self._slots) / max(1, self.num_slots)

    def forget(self) -> None:
        """The memory is somebody else's from now on: no slot holds anything, all are free."""
        for slot in self._slots:
            slot.content, slot.is_free, slot.filled, slot.emptied = None, True, None, None
        self._next = 0

    def slot_for(self, item: int) -> Slot:
        """The slot that the ring's item number `item` would get now."""
        return self._slots[item if self.is_resident else self._next]

    def advance(self) -> None:
        """The slot just given is taken: the next one's turn."""
        self._next = (self._next + 1) % self.num_slots

    def split(self, slot: Slot, sizes: Sequence[int]) -> list[Tensor]:
        """Bytes of a slot for parts of `sizes`, each aligned."""
        parts, start = [], 0
        for size in sizes:
            parts.append(slot.memory[start : start + size])
            start += aligned(size)
        assert start <= self.slot_bytes, "an item is larger than its ring's slots"
        return parts
