"""The writer's side of the KV pool: prefill attaches the segment and writes under a lease."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from headwater.errors import LeaseError
from headwater.kv.memory import KvMemory
from headwater.kv.words import prompt_word
from headwater.shm import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headwater.kv.layout import KvLayout
    from headwater.kv.lease import KvLease
    from headwater.shm import SegmentHandle


class KvWriter:
    """One attached pool. Close it when its epoch is over; views keep the memory until they go."""

    def __init__(self, handle: SegmentHandle, layout: KvLayout) -> None:
        """Raises SegmentError when the segment is not what the handle says."""
        self._segment = Segment.attach_handle(handle, writable=True)
        self.handle = handle
        self.memory = KvMemory(self._segment, layout)

    @contextmanager
    def writing(self, lease: KvLease) -> Iterator[None]:
        """Holds the slot's writer lock, so that the blocks stay this lease's until the end.

        Raises LeaseError when the lease is over or somebody writes under it already.
        """
        if not self._segment.try_lock_slot(lease.slot):
            raise LeaseError(f"lease {lease.lease_id}: another prefill writes under it")
        try:
            self.check(lease)
            yield
        finally:
            self._segment.unlock_slot(lease.slot)

    def check(self, lease: KvLease) -> None:
        """Raises LeaseError when the lease is over; cheap enough to call between layers."""
        layout = self.memory.layout
        if self._segment.load_u64(layout.generation_offset(lease.slot)) != lease.generation:
            raise LeaseError(f"lease {lease.lease_id}: it was released or it expired")

    def complete(self, lease: KvLease, token_ids: Sequence[int]) -> None:
        """Marks the prompt as computed."""
        offset = self.memory.layout.complete_offset(lease.slot)
        self._segment.store_u64(offset, prompt_word(lease.generation, token_ids))

    def fileno(self) -> int:
        """The file descriptor that the locks of `writing` hang on; see Segment.fileno."""
        return self._segment.fileno()

    def close(self) -> None:
        """Detaches."""
        self._segment.close()
