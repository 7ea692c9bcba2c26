"""Whether this card's attention is right, looked at before decode takes it.

The tiles of most cards are derived and not measured, and long contexts are what a wrong loop would
show in: so each kind of attention is compared with plain torch, where programs take several tiles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from headwater.gpu.cached_attention import CacheShape, attended, cache_shape

if TYPE_CHECKING:
    from headwater.model.spec import ModelSpec

# Rows and positions: few, and many (kernels/attend.py).
_SIZES = ((1, 16000), (8, 2100))
# Of the cache that is attended to; with many heads, contexts are shorter.
_MOST_ELEMENTS = 1 << 25
# FP16 queries and shares cost 3e-4; a tile of 64 positions that is lost, 3e-2 and more.
_TOLERANCE = 5e-3


def check_attention(spec: ModelSpec, device: torch.device) -> None:
    """Raises RuntimeError, in one sentence, when a kind of the model's attention is wrong."""
    attentions = [layer.attention for layer in spec.layers]
    kinds = {(cache_shape(attention), attention.num_heads) for attention in attentions}
    for (shape, heads), (rows, positions) in [(k, s) for k in kinds for s in _SIZES]:
        context = min(positions, _MOST_ELEMENTS // (rows * math.prod(shape.entry)))
        error = attention_error(shape, heads, rows, context, device)
        # Written so that NaN fails.
        if not error <= _TOLERANCE:
            raise RuntimeError(
                f"attention of {rows} rows over {context} positions is wrong (relative error "
                f"{error:.1e}); report the card, and set gpu.decode = off meanwhile"
            )


def attention_error(
    shape: CacheShape, heads: int, rows: int, context: int, device: torch.device
) -> float:
    """Relative L2 of `attend` against FP32, for rows of random entries, each somewhat shorter."""
    from headwater.gpu.kernels import attend

    generator = torch.Generator(device).manual_seed(1)
    width = shape.key_dim + shape.rope_dim
    queries = torch.randn(rows, heads, width, device=device, generator=generator)
    queries *= 2 / width**0.5
    cache = torch.randn(rows, context, *shape.entry, device=device, generator=generator).half()
    positions = context - 1 - 7 * torch.arange(rows, device=device)
    positions = positions.clamp(min=0)
    out = torch.full((rows, heads, shape.value_dim), float("nan"), device=device)
    attend.attend(queries, cache, positions, shape, context, out)
    expected = attended(queries, cache, positions, shape)
    return float((out - expected).norm() / expected.norm())
