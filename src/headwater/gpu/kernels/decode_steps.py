"""What lies between the products of a decode step's attention, one kernel each (Triton).

Owns the fusions: a captured step is bound by the number of its kernels, each of which costs about
as much as reading ten megabytes. What they compute is what decode_attention.py says in torch, which
CPUs run. Where the CPU's kernels multiply FP32, here are two products of FP16 (pieces.in_two).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.gpu.kernels.grouped import product_type
from headwater.gpu.kernels.pieces import as_entry, in_two, rms_norm, sum_of_pieces
from headwater.gpu.precision import ROUNDED

if TYPE_CHECKING:
    from headwater.gpu.resident import Norm
    from headwater.model.layer_spec import GqaSpec, MlaSpec

_TOKENS, _COLUMNS = 16, 128


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
        q = sum_of_pieces(partial, token, num_tokens, 0, width, column, mask, pieces)
        scale = tl.load(q_norm + column, mask=mask, other=0.0)
        q = rms_norm(q, scale, eps, q_rank)
        place = compressed + token * q_rank + column
        tl.store(place, q.to(compressed.dtype.element_ty), mask=mask)
    position = tl.load(positions + token)
    entry = cache + token.to(tl.int64) * cache_row + position * (rank + rope)
    column = tl.arange(0, kv_block)
    mask = column < rank
    latent = sum_of_pieces(partial, token, num_tokens, q_rank, width, column, mask, pieces)
    latent = rms_norm(latent, tl.load(kv_norm + column, mask=mask, other=0.0), eps, rank)
    tl.store(entry + column, as_entry(latent, cache), mask=mask)
    half: tl.constexpr = rope // 2
    pair = tl.arange(0, half_block)
    mask = pair < half
    start: tl.constexpr = q_rank + rank
    if is_interleaved:
        first = sum_of_pieces(partial, token, num_tokens, start, width, 2 * pair, mask, pieces)
        second = sum_of_pieces(partial, token, num_tokens, start, width, 2 * pair + 1, mask, pieces)
    else:
        first = sum_of_pieces(partial, token, num_tokens, start, width, pair, mask, pieces)
        second = sum_of_pieces(partial, token, num_tokens, start, width, half + pair, mask, pieces)
    c = tl.load(cos + position * half + pair, mask=mask, other=0.0)
    s = tl.load(sin + position * half + pair, mask=mask, other=0.0)
    target = entry + rank + pair
    tl.store(target, as_entry(first * c - second * s, cache), mask=mask)
    tl.store(target + half, as_entry(second * c + first * s, cache), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _mla_queries(
    partial,
    cos,
    sin,
    positions,
    keys,
    queries,
    scale,
    num_tokens,
    heads: tl.constexpr,
    nope: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    pieces: tl.constexpr,
    is_interleaved: tl.constexpr,
    product: tl.constexpr,
    token_block: tl.constexpr,
    nope_block: tl.constexpr,
    rank_block: tl.constexpr,
    half_block: tl.constexpr,
):
    head, part = tl.program_id(0), tl.program_id(1)
    token = (tl.program_id(2) * token_block + tl.arange(0, token_block))[:, None]
    is_token = token < num_tokens
    width: tl.constexpr = heads * (nope + rope)
    start = head * (nope + rope)
    row = tl.arange(0, nope_block)
    mask = is_token & (row < nope)[None, :]
    plain = sum_of_pieces(partial, token, num_tokens, start, width, row[None, :], mask, pieces)
    column = part * rank_block + tl.arange(0, rank_block)
    place = keys + (head * nope + row[:, None]) * rank + column[None, :]
    key = tl.load(place, mask=(row < nope)[:, None] & (column < rank)[None, :], other=0.0)
    high, low = in_two(plain * scale, product)
    found = tl.dot(high, key.to(product)) + tl.dot(low, key.to(product))
    target = queries + (token * heads + head) * (rank + rope)
    kind: tl.constexpr = queries.dtype.element_ty
    mask_found = is_token & (column < rank)[None, :]
    tl.store(target + column[None, :], found.to(kind), mask=mask_found)
    if part == 0:
        half: tl.constexpr = rope // 2
        pair = tl.arange(0, half_block)[None, :]
        is_pair = is_token & (pair < half)
        step: tl.constexpr = 2 if is_interleaved else 1
        other: tl.constexpr = 1 if is_interleaved else half
        at = start + nope
        first = sum_of_pieces(partial, token, num_tokens, at, width, step * pair, is_pair, pieces)
        second = sum_of_pieces(
            partial, token, num_tokens, at + other, width, step * pair, is_pair, pieces
        )
        position = tl.load(positions + token, mask=is_token, other=0)
        c = tl.load(cos + position * half + pair, mask=is_pair, other=0.0) * scale
        s = tl.load(sin + position * half + pair, mask=is_pair, other=0.0) * scale
        tl.store(target + rank + pair, (first * c - second * s).to(kind), mask=is_pair)
        tl.store(target + rank + half + pair, (second * c + first * s).to(kind), mask=is_pair)


@triton.jit(do_not_specialize=["num_tokens"])
def _mla_values(
    latents,
    values,
    out,
    num_tokens,
    heads: tl.constexpr,
    rank: tl.constexpr,
    width: tl.constexpr,
    product: tl.constexpr,
    token_block: tl.constexpr,
    rank_block: tl.constexpr,
    block: tl.constexpr,
):
    head = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    token = tl.program_id(2) * token_block + tl.arange(0, token_block)
    total = tl.zeros((token_block, block), dtype=tl.float32)
    for first in tl.static_range(0, rank, rank_block):
        row = first + tl.arange(0, rank_block)
        place = latents + (token[:, None] * heads + head) * rank + row[None, :]
        mask = (token < num_tokens)[:, None] & (row < rank)[None, :]
        high, low = in_two(tl.load(place, mask=mask, other=0.0), product)
        place = values + (head * rank + row[:, None]) * width + column[None, :]
        mask = (row < rank)[:, None] & (column < width)[None, :]
        value = tl.load(place, mask=mask, other=0.0).to(product)
        total += tl.dot(high, value) + tl.dot(low, value)
    target = out + (token[:, None] * heads + head) * width + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < width)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _gqa_inputs(
    partial,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    queries,
    cache,
    eps,
    scale,
    num_tokens,
    cache_row,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    pieces: tl.constexpr,
    is_interleaved: tl.constexpr,
    half_block: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = (heads + 2 * kv_heads) * dim
    half: tl.constexpr = dim // 2
    step: tl.constexpr = 2 if is_interleaved else 1
    other: tl.constexpr = 1 if is_interleaved else half
    pair = tl.arange(0, half_block)
    mask = pair < half
    at = head * dim
    position = tl.load(positions + token)
    entry = cache + token.to(tl.int64) * cache_row + position * (2 * kv_heads * dim)
    if head >= heads + kv_heads:
        # Values stay as they are, in their own order.
        kept = entry + (head - heads) * dim + pair
        first = sum_of_pieces(partial, token, num_tokens, at, width, pair, mask, pieces)
        second = sum_of_pieces(partial, token, num_tokens, at + half, width, pair, mask, pieces)
        tl.store(kept, as_entry(first, cache), mask=mask)
        tl.store(kept + half, as_entry(second, cache), mask=mask)
    else:
        column = step * pair
        first = sum_of_pieces(partial, token, num_tokens, at, width, column, mask, pieces)
        second = sum_of_pieces(partial, token, num_tokens, at + other, width, column, mask, pieces)
        if q_norm is not None:
            square = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / dim
            norm = k_norm
            if head < heads:
                norm = q_norm
            factor = tl.rsqrt(square + eps)
            first *= factor * tl.load(norm + column, mask=mask, other=0.0)
            second *= factor * tl.load(norm + other + column, mask=mask, other=0.0)
        c = tl.load(cos + position * half + pair, mask=mask, other=0.0)
        s = tl.load(sin + position * half + pair, mask=mask, other=0.0)
        low, high = first * c - second * s, second * c + first * s
        if head < heads:
            query = queries + (token * heads + head) * dim + pair
            tl.store(query, low * scale, mask=mask)
            tl.store(query + half, high * scale, mask=mask)
        else:
            key = entry + (head - heads) * dim + pair
            tl.store(key, as_entry(low, cache), mask=mask)
            tl.store(key + half, as_entry(high, cache), mask=mask)


def mla_inputs(
    spec: MlaSpec,
    partial: Tensor,
    norms: tuple[Tensor | None, Tensor],
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """From pieces of x times q_a and kv_a: compressed queries, FP16; the entry goes to the cache.

    `partial` is [pieces, T, q rank + rank + rope], `cache` [T, context, rank + rope].
    """
    pieces, num_tokens, _ = partial.shape
    q_rank = spec.q_lora_rank or 0
    compressed = torch.empty(num_tokens, q_rank, dtype=ROUNDED, device=partial.device)
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
    spec: MlaSpec,
    partial: Tensor,
    keys: Tensor,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
) -> Tensor:
    """From pieces of queries [pieces, T, heads * (nope + rope)]: BF16 [T, heads, rank + rope].

    `keys` is FP16 [heads, nope, rank]; queries are rotated, and scaled for the softmax.
    """
    pieces, num_tokens, _ = partial.shape
    rank = spec.kv_lora_rank
    queries = torch.empty(
        num_tokens,
        spec.num_heads,
        rank + spec.rope_dim,
        dtype=torch.bfloat16,
        device=partial.device,
    )
    rank_block = min(_COLUMNS, triton.next_power_of_2(rank))
    grid = (spec.num_heads, triton.cdiv(rank, rank_block), triton.cdiv(num_tokens, _TOKENS))
    _mla_queries[grid](
        partial,
        angles[0],
        angles[1],
        positions,
        keys,
        queries,
        spec.softmax_scale,
        num_tokens,
        spec.num_heads,
        spec.nope_dim,
        rank,
        spec.rope_dim,
        pieces,
        spec.rope.is_interleaved,
        product_type(keys.dtype),
        _TOKENS,
        max(16, triton.next_power_of_2(spec.nope_dim)),
        rank_block,
        triton.next_power_of_2(spec.rope_dim // 2),
        num_warps=4,
    )
    return queries


def mla_values(spec: MlaSpec, latents: Tensor, values: Tensor) -> Tensor:
    """FP32 latents [T, heads, rank], FP16 values [heads, rank, v] -> FP16 [T, heads * v]."""
    num_tokens = latents.shape[0]
    width = spec.num_heads * spec.v_dim
    out = torch.empty(num_tokens, width, dtype=ROUNDED, device=latents.device)
    block = min(32, max(16, triton.next_power_of_2(spec.v_dim)))
    grid = (spec.num_heads, triton.cdiv(spec.v_dim, block), triton.cdiv(num_tokens, _TOKENS))
    _mla_values[grid](
        latents,
        values,
        out,
        num_tokens,
        spec.num_heads,
        spec.kv_lora_rank,
        spec.v_dim,
        product_type(values.dtype),
        _TOKENS,
        min(_COLUMNS, max(16, triton.next_power_of_2(spec.kv_lora_rank))),
        block,
        num_warps=4,
    )
    return out


def gqa_inputs(
    spec: GqaSpec,
    partial: Tensor,
    norms: tuple[Norm, Norm] | None,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: Tensor,
) -> Tensor:
    """From pieces of x times q, k and v: FP32 queries [T, heads, dim]; the entry goes to the cache.

    `partial` is [pieces, T, (heads + 2 kv heads) * dim], `cache` [T, context, 2, kv heads, dim].
    Queries and keys are normalised, if there are norms, and rotated, queries scaled.
    """
    pieces, num_tokens, _ = partial.shape
    queries = torch.empty(num_tokens, spec.num_heads, spec.head_dim, device=partial.device)
    _gqa_inputs[(num_tokens, spec.num_heads + 2 * spec.num_kv_heads)](
        partial,
        None if norms is None else norms[0].weight,
        None if norms is None else norms[1].weight,
        angles[0],
        angles[1],
        positions,
        queries,
        cache,
        0.0 if norms is None else norms[0].eps,
        spec.softmax_scale,
        num_tokens,
        cache.stride(0),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        pieces,
        spec.rope.is_interleaved,
        triton.next_power_of_2(spec.head_dim // 2),
        num_warps=1,
    )
    return queries
