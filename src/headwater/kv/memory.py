"""A KV segment as tensors: the pages of every layer and the hidden state of every slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.kv.layout import HIDDEN_ITEM_BYTES, KV_ITEM_BYTES
from headwater.kv.pages import ENTRY_DTYPE, KvPages

if TYPE_CHECKING:
    from headwater.kv.layout import KvLayout
    from headwater.kv.pool import KvCopies
    from headwater.shm import Segment


class KvMemory:
    """Views into a segment; they keep it mapped."""

    def __init__(self, segment: Segment, layout: KvLayout) -> None:
        self.layout = layout
        self.pages = KvPages(
            layers=[_layer_view(segment, layout, i) for i in range(layout.num_layers)],
            block_tokens=layout.block_tokens,
        )
        buffer = segment.view(
            layout.hidden_offset, layout.num_slots * layout.hidden_size * HIDDEN_ITEM_BYTES
        )
        self.hidden = torch.frombuffer(buffer, dtype=torch.float32).view(
            layout.num_slots, layout.hidden_size
        )

    def copy(self, copies: KvCopies) -> None:
        """Copies blocks, in all layers, and a slot's hidden state."""
        for layer in self.pages.layers:
            for source, target in copies.blocks:
                layer[target] = layer[source]
        source, target = copies.slots
        self.hidden[target] = self.hidden[source]


def _layer_view(segment: Segment, layout: KvLayout, layer: int) -> torch.Tensor:
    num_bytes = layout.num_blocks * layout.block_bytes
    buffer = segment.view(layout.layer_offset(layer), num_bytes)
    flat = torch.frombuffer(buffer, dtype=ENTRY_DTYPE, count=num_bytes // KV_ITEM_BYTES)
    return flat.view(layout.num_blocks, *layout.block_shape)
