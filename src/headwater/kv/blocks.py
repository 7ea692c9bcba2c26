"""The blocks of a pool: who refers to each, and which hold something that may be used again.

Not thread-safe; the pool that owns it locks. Knows nothing of leases or of memory.

A block is free, held (by one or more leases), or kept: nobody holds it, but its content has a name
and stays until the room is needed, the longest unused one going first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A name has become usable (`is_stored`) or is gone; `parent` names the block before it."""

    is_stored: bool
    name: bytes
    parent: bytes = b""
    token_ids: tuple[int, ...] = ()


class BlockTable:
    """Counts references to blocks and keeps named content."""

    def __init__(
        self, num_blocks: int, on_event: Callable[[BlockEvent], None] = lambda _: None
    ) -> None:
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._names: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._stored: dict[bytes, BlockEvent] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._on_event = on_event

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_named(self) -> int:
        """Blocks, held or kept, whose content may be used again."""
        return len(self._names)

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds but whose content may be used again."""
        return len(self._kept)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of known names from the start; nothing is held yet."""
        found = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a reference to blocks that are held or kept."""
        for block in blocks:
            self._references[block] += 1
            self._kept.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Blocks with undefined content, each with one reference; the caller checked for room."""
        taken = []
        for _ in range(count):
            if not self._free:
                self._forget_oldest()
            block = self._free.popleft()
            self._references[block] = 1
            taken.append(block)
        return taken

    def drop(self, blocks: Sequence[int]) -> None:
        """Takes a reference away from each."""
        # Later blocks are of use only after earlier ones, so the last ones are to go first.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._names:
                self._kept[block] = None
            else:
                self._free.append(block)

    def name(self, block: int, name: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Says what a held, completely written block contains; a known name stays where it is."""
        if block in self._names or name in self._blocks:
            return
        self._names[block] = name
        self._blocks[name] = block
        event = self._stored[name] = BlockEvent(True, name, parent, tuple(token_ids))
        self._on_event(event)

    def stored(self) -> list[BlockEvent]:
        """What can be used now; the block before another one comes before it."""
        ordered: dict[bytes, BlockEvent] = {}
        for event in self._stored.values():
            # A parent that was forgotten and came back is younger than its children.
            line: list[BlockEvent] = []
            each: BlockEvent | None = event
            while each is not None and each.name not in ordered:
                line.append(each)
                each = self._stored.get(each.parent)
            ordered |= {each.name: each for each in reversed(line)}
        return list(ordered.values())

    def flush(self) -> int:
        """Forgets all that nobody holds; returns the number of blocks."""
        count = len(self._kept)
        for _ in range(count):
            self._forget_oldest()
        return count

    def _forget_oldest(self) -> None:
        block, _ = self._kept.popitem(last=False)
        name = self._names.pop(block)
        del self._blocks[name], self._stored[name]
        self._free.append(block)
        self._on_event(BlockEvent(False, name))
