"""A KV lease: what decode promises to a request, as data that travels between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.kv.layout import KvLayout
    from headwater.shm import SegmentHandle


@dataclass(frozen=True, slots=True)
class KvLease:
    """The right to write and read some blocks; the fields of headwater.v1.KvLease."""

    lease_id: int
    segment: SegmentHandle
    layout: KvLayout
    slot: int
    generation: int
    block_ids: tuple[int, ...]
    cached_tokens: int
    ttl_ms: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the blocks hold."""
        return len(self.block_ids) * self.layout.block_tokens
