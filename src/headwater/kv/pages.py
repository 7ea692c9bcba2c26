"""The paged store of keys and values of one pool: writes and reads per layer.

Owns the layout inside a block (see headwater.v1.KvLayout), not the memory: the tensors may be views
of a shared segment. Knows nothing of leases or of who may write which block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kv.layout import KvLayout

# Eight times the precision of BF16, and more than the range that keys, values and latents need.
ENTRY_DTYPE = torch.float16


def as_entries(x: Tensor, dtype: torch.dtype = ENTRY_DTYPE) -> Tensor:
    """Keys, values or latents as pages keep them; what is beyond the range becomes its end."""
    greatest = torch.finfo(dtype).max
    return x.clamp(-greatest, greatest).to(dtype)


@dataclass(frozen=True, slots=True)
class KvPages:
    """One FP16 tensor per layer: [num_blocks, *KvLayout.block_shape]."""

    layers: list[Tensor]
    block_tokens: int

    @classmethod
    def allocate(cls, layout: KvLayout) -> KvPages:
        """Pages of `layout` in private memory, for a single process."""
        shape = (layout.num_blocks, *layout.block_shape)
        layers = [torch.zeros(shape, dtype=ENTRY_DTYPE) for _ in range(layout.num_layers)]
        return cls(layers, layout.block_tokens)

    def write_gqa(
        self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Stores token i at `offsets[i]` of block `blocks[i]`.

        `blocks` and `offsets` are int64 [T]; `keys` and `values` are [T, num_kv_heads, head_dim],
        rounded to FP16 on the way.
        """
        pages = self.layers[layer]
        pages[blocks, :, offsets] = as_entries(torch.stack((keys, values), dim=1), pages.dtype)

    def read_gqa(self, layer: int, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `num_tokens` tokens of the sequence in `block_ids`.

        Both are FP32 [num_kv_heads, num_tokens, head_dim].
        """
        blocks = self._select(layer, block_ids, num_tokens)
        both = blocks.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :num_tokens].float()
        return both[0], both[1]

    def write_mla(self, layer: int, blocks: Tensor, offsets: Tensor, entries: Tensor) -> None:
        """Stores token i, `entries[i]` of [T, head_dim], at `offsets[i]` of block `blocks[i]`."""
        pages = self.layers[layer]
        pages[blocks, offsets] = as_entries(entries, pages.dtype)

    def read_mla(self, layer: int, block_ids: Tensor, num_tokens: int) -> Tensor:
        """The first `num_tokens` entries of the sequence in `block_ids`: FP32 [num_tokens, dim]."""
        return self._select(layer, block_ids, num_tokens).flatten(0, 1)[:num_tokens].float()

    def _select(self, layer: int, block_ids: Tensor, num_tokens: int) -> Tensor:
        num_blocks = -(-num_tokens // self.block_tokens)
        return self.layers[layer].index_select(0, block_ids[:num_blocks])
