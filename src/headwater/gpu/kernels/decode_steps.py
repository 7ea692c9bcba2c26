"""What lies between the products of a decode step, one kernel each (Triton).

Owns the fusions: a captured step is bound by the number of its kernels, each of which costs about
as much as reading ten megabytes. What they compute is what decode_attention.py and
hybrid_decoder.py say in torch, which CPUs run.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from headwater.model.layer_spec import MlaSpec, MoeFfnSpec

# Scores of a row that a program keeps in its registers.
_MAX_ROW = 1 << 15


@triton.jit
def _rms_norm(x, weight, eps, width: tl.constexpr, mask, column):
    """FP32 x, zero beyond `width`, over its root mean square, times the weight."""
    square = tl.sum(x * x, axis=0) / width
    scale = tl.load(weight + column, mask=mask, other=0.0)
    return x * tl.rsqrt(square + eps) * scale


@triton.jit
def _pieces(partial, row, rows_in_all, first, width, column, mask, pieces: tl.constexpr):
    """The sum of the pieces [pieces, rows, width] that make up columns of a row."""
    place = row.to(tl.int64) * width + first + column
    total = tl.load(partial + place, mask=mask, other=0.0)
    for piece in tl.static_range(1, pieces):
        total += tl.load(partial + piece * rows_in_all * width + place, mask=mask, other=0.0)
    return total


@triton.jit
def _add_and_norm(
    hidden,
    partial,
    weight,
    normal,
    rounded,
    eps,
    num_tokens,
    width: tl.constexpr,
    pieces: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    place = token * width + column
    x = tl.load(hidden + place, mask=mask, other=0.0)
    if pieces > 0:
        x += _pieces(partial, token, num_tokens, 0, width, column, mask, pieces)
        tl.store(hidden + place, x, mask=mask)
    y = _rms_norm(x, weight, eps, width, mask, column)
    if normal is not None:
        tl.store(normal + place, y, mask=mask)
    tl.store(rounded + place, y.to(rounded.dtype.element_ty), mask=mask)


@triton.jit
def _mla_inputs(
    partial,
    q_norm,
    kv_norm,
    cos,
    sin,
    positions,
    compressed,
    cache,
    eps,
    num_tokens,
    cache_row,
    q_rank: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    pieces: tl.constexpr,
    is_interleaved: tl.constexpr,
    q_block: tl.constexpr,
    kv_block: tl.constexpr,
    half_block: tl.constexpr,
):
    token = tl.program_id(0)
    width: tl.constexpr = q_rank + rank + rope
    if q_rank > 0:
        column = tl.arange(0, q_block)
        mask = column < q_rank
        q = _pieces(partial, token, num_tokens, 0, width, column, mask, pieces)
        q = _rms_norm(q, q_norm, eps, q_rank, mask, column)
        place = compressed + token * q_rank + column
        tl.store(place, q.to(compressed.dtype.element_ty), mask=mask)
    position = tl.load(positions + token)
    entry = cache + token.to(tl.int64) * cache_row + position * (rank + rope)
    column = tl.arange(0, kv_block)
    mask = column < rank
    latent = _pieces(partial, token, num_tokens, q_rank, width, column, mask, pieces)
    latent = _rms_norm(latent, kv_norm, eps, rank, mask, column)
    tl.store(entry + column, latent.to(cache.dtype.element_ty), mask=mask)
    half: tl.constexpr = rope // 2
    pair = tl.arange(0, half_block)
    mask = pair < half
    start: tl.constexpr = q_rank + rank
    if is_interleaved:
        first = _pieces(partial, token, num_tokens, start, width, 2 * pair, mask, pieces)
        second = _pieces(partial, token, num_tokens, start, width, 2 * pair + 1, mask, pieces)
    else:
        first = _pieces(partial, token, num_tokens, start, width, pair, mask, pieces)
        second = _pieces(partial, token, num_tokens, start, width, half + pair, mask, pieces)
    c = tl.load(cos + position * half + pair, mask=mask, other=0.0)
    s = tl.load(sin + position * half + pair, mask=mask, other=0.0)
    target = entry + rank + pair
    tl.store(target, (first * c - second * s).to(cache.dtype.element_ty), mask=mask)
    tl.store(target + half, (second * c + first * s).to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _mla_queries(
    partial,
    cos,
    sin,
    positions,
    plain,
    queries,
    scale,
    num_tokens,
    heads: tl.constexpr,
    nope: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    pieces: tl.constexpr,
    is_interleaved: tl.constexpr,
    nope_block: tl.constexpr,
    half_block: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = heads * (nope + rope)
    start = head * (nope + rope)
    column = tl.arange(0, nope_block)
    mask = column < nope
    found = _pieces(partial, token, num_tokens, start, width, column, mask, pieces)
    place = plain + (head * num_tokens + token) * nope + column
    tl.store(place, (found * scale).to(plain.dtype.element_ty), mask=mask)
    half: tl.constexpr = rope // 2
    pair = tl.arange(0, half_block)
    mask = pair < half
    start += nope
    if is_interleaved:
        first = _pieces(partial, token, num_tokens, start, width, 2 * pair, mask, pieces)
        second = _pieces(partial, token, num_tokens, start, width, 2 * pair + 1, mask, pieces)
    else:
        first = _pieces(partial, token, num_tokens, start, width, pair, mask, pieces)
        second = _pieces(partial, token, num_tokens, start, width, half + pair, mask, pieces)
    position = tl.load(positions + token)
    c = tl.load(cos + position * half + pair, mask=mask, other=0.0) * scale
    s = tl.load(sin + position * half + pair, mask=mask, other=0.0) * scale
    target = queries + (token * heads + head) * (rank + rope) + rank + pair
    tl.store(target, (first * c - second * s).to(queries.dtype.element_ty), mask=mask)
    tl.store(target + half, (second * c + first * s).to(queries.dtype.element_ty), mask=mask)


@triton.jit
def _masked_softmax(scores, positions, out, heads, bound: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(positions + row // heads)
    column = tl.arange(0, block)
    is_seen = (column < bound) & (column <= last)
    found = tl.load(scores + row * bound + column, mask=is_seen, other=float("-inf"))
    shares = tl.exp(found - tl.max(found, axis=0))
    shares = shares / tl.sum(shares, axis=0)
    tl.store(out + row * bound + column, shares.to(out.dtype.element_ty), mask=column < bound)


@triton.jit
def _choose(
    logits,
    bias,
    experts,
    weights,
    scale,
    num_experts: tl.constexpr,
    choices: tl.constexpr,
    groups: tl.constexpr,
    open_groups: tl.constexpr,
    is_normalized: tl.constexpr,
    block: tl.constexpr,
    choice_block: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.arange(0, block)
    mask = expert < num_experts
    low = float("-inf")
    found = tl.load(logits + token * num_experts + expert, mask=mask, other=low)
    if bias is None:
        scores = tl.exp(found - tl.max(found, axis=0))
        scores = scores / tl.sum(scores, axis=0)
        ranking = tl.where(mask, scores, low)
    else:
        scores = 1.0 / (1.0 + tl.exp(-found))
        ranking = scores + tl.load(bias + expert, mask=mask, other=0.0)
        ranking = tl.where(mask, ranking, low)
        size: tl.constexpr = num_experts // groups
        # A group counts by the sum of its two best.
        worth = tl.full((block,), low, tl.float32)
        for group in tl.static_range(groups):
            is_mine = (expert // size == group) & mask
            mine = tl.where(is_mine, ranking, low)
            best = tl.max(mine, axis=0)
            place = tl.argmax(mine, axis=0)
            second = tl.max(tl.where(expert == place, low, mine), axis=0)
            worth = tl.where(is_mine, best + second, worth)
        is_open = tl.zeros((block,), dtype=tl.int32)
        left = worth
        for _ in tl.static_range(open_groups):
            place = tl.argmax(left, axis=0)
            is_best = (expert // size == place // size) & mask
            is_open = tl.where(is_best, 1, is_open)
            left = tl.where(is_best, low, left)
        ranking = tl.where(is_open == 1, ranking, low)
    slot = tl.arange(0, choice_block)
    chosen = tl.zeros((choice_block,), dtype=tl.int32)
    shares = tl.zeros((choice_block,), dtype=tl.float32)
    for choice in tl.static_range(choices):
        place = tl.argmax(ranking, axis=0)
        share = tl.sum(tl.where(expert == place, scores, 0.0), axis=0)
        chosen = tl.where(slot == choice, place.to(tl.int32), chosen)
        shares = tl.where(slot == choice, share, shares)
        ranking = tl.where(expert == place, low, ranking)
    if is_normalized:
        shares = shares / (tl.sum(shares, axis=0) + 1e-20)
    target = token * choices + slot
    tl.store(experts + target, chosen, mask=slot < choices)
    tl.store(weights + target, shares * scale, mask=slot < choices)


def add_and_norm(
    hidden: Tensor, partial: Tensor | None, weight: Tensor, eps: float, *, is_kept: bool
) -> tuple[Tensor | None, Tensor]:
    """hidden += the sum of partial's pieces; its norm in FP32, if kept, and in BF16.

    `hidden` is FP32 [T, N], `partial` FP32 [pieces, T, N] or None.
    """
    num_tokens, width = hidden.shape
    normal = torch.empty_like(hidden) if is_kept else None
    rounded = torch.empty_like(hidden, dtype=torch.bfloat16)
    _add_and_norm[(num_tokens,)](
        hidden,
        partial,
        weight,
        normal,
        rounded,
        eps,
        num_tokens,
        width,
        0 if partial is None else partial.shape[0],
        triton.next_power_of_2(width),
        num_warps=16,
    )
    return normal, rounded


def mla_inputs(
    spec: MlaSpec,
    partial: Tensor,
    norms: tuple[Tensor | None, Tensor],
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """From pieces of x times q_a and kv_a: compressed queries, BF16; the entry goes to the cache.

    `partial` is [pieces, T, q rank + rank + rope], `cache` [T, context, rank + rope].
    """
    pieces, num_tokens, _ = partial.shape
    q_rank = spec.q_lora_rank or 0
    compressed = torch.empty(num_tokens, q_rank, dtype=torch.bfloat16, device=partial.device)
    _mla_inputs[(num_tokens,)](
        partial,
        norms[0],
        norms[1],
        angles[0],
        angles[1],
        positions,
        compressed,
        cache,
        eps,
        num_tokens,
        cache.stride(0),
        q_rank,
        spec.kv_lora_rank,
        spec.rope_dim,
        pieces,
        spec.rope.is_interleaved,
        triton.next_power_of_2(max(1, q_rank)),
        triton.next_power_of_2(spec.kv_lora_rank),
        triton.next_power_of_2(spec.rope_dim // 2),
        num_warps=8,
    )
    return compressed


def mla_queries(
    spec: MlaSpec, partial: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """From pieces of queries: their plain part, BF16 [heads, T, nope], and BF16 [T, heads, rank +
    rope] with the rotated part in its place; both are scaled for the softmax."""
    pieces, num_tokens, _ = partial.shape
    width = spec.kv_lora_rank + spec.rope_dim
    plain, queries = (
        torch.empty(shape, dtype=torch.bfloat16, device=partial.device)
        for shape in (
            (spec.num_heads, num_tokens, spec.nope_dim),
            (num_tokens, spec.num_heads, width),
        )
    )
    _mla_queries[(num_tokens, spec.num_heads)](
        partial,
        angles[0],
        angles[1],
        positions,
        plain,
        queries,
        spec.softmax_scale,
        num_tokens,
        spec.num_heads,
        spec.nope_dim,
        spec.kv_lora_rank,
        spec.rope_dim,
        pieces,
        spec.rope.is_interleaved,
        triton.next_power_of_2(spec.nope_dim),
        triton.next_power_of_2(spec.rope_dim // 2),
        num_warps=1,
    )
    return plain, queries


def masked_softmax(scores: Tensor, positions: Tensor) -> Tensor:
    """FP32 [T, heads, bound] -> BF16: over the columns up to each token's position."""
    num_tokens, heads, bound = scores.shape
    if bound > _MAX_ROW:
        columns = torch.arange(bound, device=scores.device)
        is_hidden = columns[None, None] > positions[:, None, None]
        return scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1).bfloat16()
    out = torch.empty_like(scores, dtype=torch.bfloat16)
    block = triton.next_power_of_2(bound)
    _masked_softmax[(num_tokens * heads,)](
        scores, positions, out, heads, bound, block, num_warps=4 if block < 8192 else 16
    )
    return out


def choose(spec: MoeFfnSpec, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What headwater.model.gate.choose_experts gives, experts as INT32; of equals, the lower."""
    num_tokens = logits.shape[0]
    experts = torch.empty(
        num_tokens, spec.experts_per_token, dtype=torch.int32, device=logits.device
    )
    weights = torch.empty(experts.shape, device=logits.device)
    _choose[(num_tokens,)](
        logits,
        bias,
        experts,
        weights,
        spec.routed_scale,
        spec.num_experts,
        spec.experts_per_token,
        spec.num_groups,
        spec.groups_per_token,
        spec.is_normalized,
        max(16, triton.next_power_of_2(spec.num_experts)),
        triton.next_power_of_2(spec.experts_per_token),
        # One warp compares without waiting for others; the comparisons follow one another.
        num_warps=1,
    )
    return experts, weights
