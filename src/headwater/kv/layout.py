"""Where everything lies in the payload of a KV segment. Pure arithmetic, no memory.

In this order, each part aligned to 4096 bytes:

1. two 64-bit words per slot: the generation of the slot's lease, and which prompt is complete
   (headwater.kv.words);
2. one FP32 hidden state per slot, [hidden_size];
3. per layer `num_blocks` blocks in FP16: [2 (key, value), block_tokens, num_kv_heads, head_dim]
   for GQA, [block_tokens, head_dim] for MLA.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from headwater.model.spec import ModelSpec

LAYOUT_VERSION = 3
ALIGNMENT = 4096
WORD_BYTES = 8
WORDS_PER_SLOT = 2
HIDDEN_ITEM_BYTES = 4
KV_ITEM_BYTES = 2


class KvKind(enum.Enum):
    """How attention keeps its state."""

    GQA = "gqa"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of a pool; `head_dim` is latent rank plus rotary dimension for MLA."""

    kind: KvKind
    num_layers: int
    num_blocks: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    num_slots: int
    hidden_size: int

    @classmethod
    def of(cls, spec: ModelSpec, *, num_blocks: int, block_tokens: int, num_slots: int = 1) -> Self:
        """The layout of a pool for a model."""
        return cls(
            kind=KvKind(spec.kv.kind),
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_kv_heads=spec.kv.num_kv_heads,
            head_dim=spec.kv.head_dim,
            num_slots=num_slots,
            hidden_size=spec.hidden_size,
        )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block of one layer."""
        if self.kind is KvKind.MLA:
            return (self.block_tokens, self.head_dim)
        return (2, self.block_tokens, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        vectors = 1 if self.kind is KvKind.MLA else 2 * self.num_kv_heads
        return vectors * self.block_tokens * self.head_dim * KV_ITEM_BYTES

    @property
    def layer_bytes(self) -> int:
        """Bytes of all blocks of one layer, padded to the alignment."""
        return aligned(self.num_blocks * self.block_bytes)

    @property
    def hidden_offset(self) -> int:
        """Start of the hidden states."""
        return aligned(self.num_slots * WORDS_PER_SLOT * WORD_BYTES)

    @property
    def layers_offset(self) -> int:
        """Start of the first layer's blocks."""
        return self.hidden_offset + aligned(self.num_slots * self.hidden_size * HIDDEN_ITEM_BYTES)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload."""
        return self.layers_offset + self.num_layers * self.layer_bytes

    def layer_offset(self, layer: int) -> int:
        """Start of a layer's blocks."""
        return self.layers_offset + layer * self.layer_bytes

    def generation_offset(self, slot: int) -> int:
        """Where the generation of the slot's lease lies."""
        return slot * WORDS_PER_SLOT * WORD_BYTES

    def complete_offset(self, slot: int) -> int:
        """Where it says which prompt is complete."""
        return self.generation_offset(slot) + WORD_BYTES

    def hidden_slot_offset(self, slot: int) -> int:
        """Where the slot's hidden state lies."""
        return self.hidden_offset + slot * self.hidden_size * HIDDEN_ITEM_BYTES

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_tokens)


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
