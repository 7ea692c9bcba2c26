"""Attention of single tokens over a cache of keys and values, cut along the context (Triton).

Owns the cut: each program takes some query heads of one token and a share of the token's context,
so that few tokens fill a card and long rows cost what reading them costs. Shares leave sums that
are not divided yet, with their maximum and the sum of exponentials (Milakov and Gimelshein, arXiv
1805.02867), and a second kernel joins them. Programs are short: what another lane has to do waits
for one of them at most, and has precedence then (precedence.py).

With few heads per key, where reading rules, queries and shares of the softmax are FP32, as two
products of FP16 each. With latents, where the tensor cores rule, they are FP16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.gpu.cached_attention import CacheShape
from headwater.gpu.kernels.grouped import product_type
from headwater.gpu.kernels.pieces import in_two
from headwater.gpu.kernels.table import capability_of
from headwater.gpu.precedence import yielding

# Programs wanted: as many as a large card holds at once, and as many again.
_PROGRAMS, _WIDE_PROGRAMS = 528, 264
# Positions of all rows together from which latents are many.
_MANY = 1 << 14
# Values from here on are latents: keys as well, and for all heads.
_WIDE = 256


@dataclass(frozen=True, slots=True)
class AttendTile:
    """Query heads and positions of a program's step, and positions that it takes at most.

    `warps` and `stages` are Triton's.
    """

    heads: int
    positions: int
    most: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class CardTiles:
    """A card's tiles: for heads with values of their own, for latents, for latents of many."""

    heads: AttendTile
    latents: AttendTile
    many: AttendTile


# sm_90: the fastest of some, measured on an H200. The others have 99 KiB of shared memory per block
# instead of 227: derived from that, not measured.
_LARGE = CardTiles(
    AttendTile(64, 64, 1024, 4, 3), AttendTile(32, 64, 2048, 8, 1), AttendTile(32, 64, 2048, 4, 2)
)
_SMALL = CardTiles(
    AttendTile(64, 32, 1024, 4, 2), AttendTile(16, 16, 2048, 4, 1), AttendTile(16, 16, 2048, 4, 1)
)


@triton.jit(do_not_specialize=["splits"])
def _attend(
    queries,
    cache,
    positions,
    sums,
    partial,
    splits,
    cache_row,
    entry: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    value_dim: tl.constexpr,
    value_offset: tl.constexpr,
    product: tl.constexpr,
    is_exact: tl.constexpr,
    head_block: tl.constexpr,
    key_block: tl.constexpr,
    rope_block: tl.constexpr,
    value_block: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
):
    token, split = tl.program_id(0), tl.program_id(2)
    blocks: tl.constexpr = (group + head_block - 1) // head_block
    kv_head = tl.program_id(1) // blocks
    member = tl.program_id(1) % blocks * head_block + tl.arange(0, head_block)
    head = kv_head * group + member
    is_head = member < group
    count = tl.load(positions + token) + 1
    each = (count + tile * splits - 1) // (tile * splits) * tile
    begin = split * each
    end = tl.minimum(begin + each, count)
    element = tl.arange(0, key_block)
    is_key = element < key_dim
    own = queries + (token * heads + head)[:, None] * (key_dim + rope_dim)
    query = tl.load(own + element[None, :], mask=is_head[:, None] & is_key[None, :], other=0.0)
    high, low = in_two(query, product)
    more = tl.arange(0, rope_block)
    if rope_dim > 0:
        is_rotary = is_head[:, None] & (more < rope_dim)[None, :]
        rotary = tl.load(own + key_dim + more[None, :], mask=is_rotary, other=0.0)
        rotary_high, rotary_low = in_two(rotary, product)
    base = cache + token.to(tl.int64) * cache_row + kv_head * key_dim
    column = tl.arange(0, value_block)
    greatest = tl.full((head_block,), float("-inf"), tl.float32)
    total = tl.zeros((head_block,), dtype=tl.float32)
    weighted = tl.zeros((head_block, value_block), dtype=tl.float32)
    for start in tl.range(begin, end, tile, num_stages=stages):
        place = start + tl.arange(0, tile)
        is_seen = place < end
        at = base + place[:, None].to(tl.int64) * entry
        key = tl.load(at + element[None, :], mask=is_seen[:, None] & is_key[None, :], other=0.0)
        key = key.to(product)
        scores = tl.dot(high, tl.trans(key))
        if is_exact:
            scores += tl.dot(low, tl.trans(key))
        if rope_dim > 0:
            is_turned = is_seen[:, None] & (more < rope_dim)[None, :]
            turned = tl.load(at + key_dim + more[None, :], mask=is_turned, other=0.0).to(product)
            scores += tl.dot(rotary_high, tl.trans(turned))
            if is_exact:
                scores += tl.dot(rotary_low, tl.trans(turned))
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        latest = tl.maximum(greatest, tl.max(scores, axis=1))
        shares = tl.exp(scores - latest[:, None])
        kept = tl.exp(greatest - latest)
        greatest = latest
        total = total * kept + tl.sum(shares, axis=1)
        weighted = weighted * kept[:, None]
        share_high, share_low = in_two(shares, product)
        if value_offset == 0:
            value = key
        else:
            is_value = is_seen[:, None] & (column < value_dim)[None, :]
            value = tl.load(at + value_offset + column[None, :], mask=is_value, other=0.0)
            value = value.to(product)
        weighted += tl.dot(share_high, value)
        if is_exact:
            weighted += tl.dot(share_low, value)
    row = (token * splits + split) * heads + head
    tl.store(sums + 2 * row, greatest, mask=is_head)
    tl.store(sums + 2 * row + 1, total, mask=is_head)
    mask = is_head[:, None] & (column < value_dim)[None, :] & (begin < end)
    tl.store(partial + row[:, None].to(tl.int64) * value_dim + column[None, :], weighted, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _join(
    sums,
    partial,
    out,
    splits,
    heads: tl.constexpr,
    value_dim: tl.constexpr,
    split_block: tl.constexpr,
    value_block: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, split_block)
    row = (token * splits + split) * heads + head
    is_split = split < splits
    greatest = tl.load(sums + 2 * row, mask=is_split, other=float("-inf"))
    # A share without a token of the context has left nothing.
    is_split = greatest > float("-inf")
    factor = tl.exp(greatest - tl.max(greatest, axis=0))
    total = tl.sum(factor * tl.load(sums + 2 * row + 1, mask=is_split, other=0.0), axis=0)
    column = tl.program_id(2) * value_block + tl.arange(0, value_block)
    mask = is_split[:, None] & (column < value_dim)[None, :]
    place = partial + row[:, None].to(tl.int64) * value_dim + column[None, :]
    weighted = tl.sum(factor[:, None] * tl.load(place, mask=mask, other=0.0), axis=0) / total
    target = out + (token * heads + head) * value_dim + column
    tl.store(target, weighted.to(out.dtype.element_ty), mask=column < value_dim)


def attend(
    queries: Tensor, cache: Tensor, positions: Tensor, shape: CacheShape, bound: int, out: Tensor
) -> None:
    """Queries [T, heads, key + rope], scaled, over each token's row up to its position: FP32, with
    latents FP16.

    `cache` is FP16 [T, context, ...] as `shape` says, int64 `positions` [T] are all below `bound`.
    `out`, FP32 or FP16 [T, heads, value_dim], is written.
    """
    num_tokens, heads, _ = queries.shape
    group = heads // shape.kv_heads
    is_wide = shape.value_dim >= _WIDE
    card = _LARGE if capability_of(queries.device) == (9, 0) else _SMALL
    latents = card.many if num_tokens * bound >= _MANY else card.latents
    one = latents if is_wide else card.heads
    head_block = min(max(16, triton.next_power_of_2(group)), one.heads)
    blocks = shape.kv_heads * triton.cdiv(group, head_block)
    programs = _WIDE_PROGRAMS if is_wide else _PROGRAMS
    splits = max(triton.cdiv(bound, one.most), programs // (num_tokens * blocks))
    splits = max(1, min(splits, triton.cdiv(bound, one.positions)))
    sums = torch.empty(num_tokens, splits, heads, 2, device=queries.device)
    partial = torch.empty(num_tokens, splits, heads, shape.value_dim, device=queries.device)
    entry = cache[0, 0].numel()
    with yielding(queries.device):
        _attend[(num_tokens, blocks, splits)](
            queries,
            cache,
            positions,
            sums,
            partial,
            splits,
            cache.stride(0),
            entry,
            heads,
            group,
            shape.key_dim,
            shape.rope_dim,
            shape.value_dim,
            shape.value_offset,
            product_type(cache.dtype),
            not is_wide,
            head_block,
            max(16, triton.next_power_of_2(shape.key_dim)),
            max(16, triton.next_power_of_2(shape.rope_dim)),
            max(16, triton.next_power_of_2(shape.value_dim)),
            one.positions,
            one.stages,
            num_warps=one.warps,
        )
    value_block = min(128, triton.next_power_of_2(shape.value_dim))
    _join[(num_tokens, heads, triton.cdiv(shape.value_dim, value_block))](
        sums,
        partial,
        out,
        splits,
        heads,
        shape.value_dim,
        triton.next_power_of_2(splits),
        value_block,
        num_warps=4,
    )
