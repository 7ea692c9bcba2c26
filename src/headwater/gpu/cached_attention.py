"""Attention of single tokens over a cache, in plain torch: what kernels/attend.py is held against.

Owns what a cache holds at each position; also what a CPU computes that stands in for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.model.layer_spec import GqaSpec, MlaSpec

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What lies at each position: keys of `key_dim`, then `rope_dim` more, for each KV head.

    Values of `value_dim` follow `value_offset` elements after the keys of the first head, or are
    the first `value_dim` elements of the keys where that is 0.
    """

    kv_heads: int
    key_dim: int
    rope_dim: int
    value_dim: int
    value_offset: int

    @property
    def entry(self) -> tuple[int, ...]:
        """Of one position: [key + rope] of latents, [2, kv heads, key + rope] otherwise."""
        width = self.key_dim + self.rope_dim
        return (width,) if self.value_offset == 0 else (2, self.kv_heads, width)


def cache_shape(attention: GqaSpec | MlaSpec) -> CacheShape:
    """What a layer keeps of each position."""
    if isinstance(attention, MlaSpec):
        rank = attention.kv_lora_rank
        return CacheShape(1, rank, attention.rope_dim, rank, 0)
    heads, dim = attention.num_kv_heads, attention.head_dim
    return CacheShape(heads, dim, 0, dim, heads * dim)


def attended(queries: Tensor, cache: Tensor, positions: Tensor, shape: CacheShape) -> Tensor:
    """FP32 queries [T, heads, key + rope], scaled, over each token's row up to its position.

    `cache` is [T, context, ...] as `shape` says, int64 `positions` are [T]. FP32 [T, heads,
    value_dim].
    """
    rows, heads, _ = queries.shape
    entries = cache.float()
    sides: Iterable[Tensor]
    if shape.value_offset == 0:
        sides = entries[:, :, None], entries[:, :, None, : shape.value_dim]
    else:
        sides = entries.unbind(dim=2)
    keys, values = (side.transpose(1, 2).flatten(0, 1) for side in sides)
    groups = queries.reshape(keys.shape[0], -1, keys.shape[-1])
    scores = torch.bmm(groups, keys.transpose(1, 2)).view(rows, heads, -1)
    is_hidden = torch.arange(cache.shape[1], device=cache.device) > positions[:, None, None]
    shares = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    return torch.bmm(shares.view(*groups.shape[:2], -1), values).view(rows, heads, -1)
