"""Attention of a layer over whole prompts: MLA with keys and values rebuilt, and GQA.

Owns the order of operations on the device; what was cached before comes from the pool's pages, and
what is new is read back as it is stored, in FP16, so that a prompt cut in two computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu import precision
from headwater.gpu.memory_plan import SLICE_TOKENS, heads_at_once
from headwater.gpu.precision import for_attention, for_cache, rounded
from headwater.gpu.softmax_attention import attend
from headwater.model.layer_spec import GqaSpec, MlaSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.gpu.dense import DenseWeights
    from headwater.gpu.kv_export import KvExport
    from headwater.gpu.portion import Portion
    from headwater.gpu.positions import Positions
    from headwater.kv.pages import KvPages
    from headwater.model.batch import SequenceSpan


@dataclass(frozen=True, slots=True)
class Context:
    """What attention needs besides hidden states and weights.

    `gather` makes the entries of all rows of the batch, in its order, of this rank's own.
    """

    layer: int
    portion: Portion
    positions: Positions
    pages: KvPages
    export: KvExport
    gather: Callable[[Tensor], Tensor]


def add_attention(
    spec: GqaSpec | MlaSpec, hidden: Tensor, weights: DenseWeights, context: Context
) -> None:
    """hidden, FP32 [n, hidden], += attention(norm(hidden)); begins to export the new entries.

    The n rows are those of context.portion.
    """
    x = normalised(hidden, weights, "attention_norm")
    if isinstance(spec, MlaSpec):
        attended = _mla(spec, x, weights, context)
    else:
        attended = _gqa(spec, x, weights, context)
    output = weights.matrix("attention.o")
    for first in range(0, x.shape[0], SLICE_TOKENS):
        stop = first + SLICE_TOKENS
        hidden[first:stop] += output.product(attended[first:stop])


def normalised(hidden: Tensor, weights: DenseWeights, name: str) -> Tensor:
    """norm(hidden) in FP16 [T, hidden]."""
    out = torch.empty_like(hidden, dtype=precision.ROUNDED)
    for first in range(0, hidden.shape[0], SLICE_TOKENS):
        stop = first + SLICE_TOKENS
        out[first:stop] = weights.norm(name, hidden[first:stop])
    return out


def _mla(spec: MlaSpec, x: Tensor, weights: DenseWeights, context: Context) -> Tensor:
    """FP16 [n, hidden] -> FP16 [n, heads * v]."""
    positions = context.positions
    cos, sin = positions.angles(spec.rope)
    rotate = positions.table(spec.rope).rotate
    compressed, q_name = x, "attention.q"
    if spec.q_lora_rank is not None:
        low = weights.matrix("attention.q_a").product(x)
        compressed, q_name = rounded(weights.norm("attention.q_a_norm", low)), "attention.q_b"
    latent, k_rope = (
        weights.matrix("attention.kv_a")
        .product(x)
        .split([spec.kv_lora_rank, spec.rope_dim], dim=-1)
    )
    k_rope = rotate(k_rope[:, None], cos, sin)[:, 0]
    latent = weights.norm("attention.kv_a_norm", latent)
    entries = for_cache(torch.cat((latent, k_rope), dim=-1))
    context.export.begin(entries)
    entries = context.gather(entries)

    q_size, kv_size = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.v_dim
    q_matrix, kv_matrix = weights.matrix(q_name), weights.matrix("attention.kv_b")
    out = x.new_empty(x.shape[0], spec.num_heads, spec.v_dim)
    for span, parts in context.portion.parts:
        keys = _with_cached(entries, span, context)
        latents, k_rope = keys.split([spec.kv_lora_rank, spec.rope_dim], dim=-1)
        latents = rounded(latents)
        step = heads_at_once(spec.num_heads, span.num_tokens, q_size)
        for head in range(0, spec.num_heads if parts else 0, step):
            stop = min(head + step, spec.num_heads)
            kv = for_attention(kv_matrix.rows(head * kv_size, stop * kv_size).product(latents))
            kv = kv.view(span.num_tokens, -1, kv_size)
            shared = for_attention(k_rope[:, None]).expand(-1, stop - head, -1)
            k = torch.cat((kv[..., : spec.nope_dim], shared), dim=-1)
            for part in parts:
                rows, seen = part.rows, span.start + part.first + part.count
                q = q_matrix.rows(head * q_size, stop * q_size).product(compressed[rows])
                q = q.view(part.count, -1, q_size)
                rotated = rotate(q[..., spec.nope_dim :], cos[rows], sin[rows])
                q = for_attention(torch.cat((q[..., : spec.nope_dim], rotated), dim=-1))
                values = kv[:seen, :, spec.nope_dim :]
                out[rows, head:stop] = attend(q, k[:seen], values, spec.softmax_scale)
    return out.flatten(1)


def _gqa(spec: GqaSpec, x: Tensor, weights: DenseWeights, context: Context) -> Tensor:
    """FP16 [n, hidden] -> FP16 [n, heads * head_dim]."""
    positions = context.positions
    cos, sin = positions.angles(spec.rope)
    rotate = positions.table(spec.rope).rotate
    counts = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    q, k, v = (
        weights.matrix(f"attention.{name}").product(x).view(x.shape[0], heads, spec.head_dim)
        for name, heads in counts.items()
    )
    if spec.has_qk_norm:
        q = weights.norm("attention.q_norm", q)
        k = weights.norm("attention.k_norm", k)
    q, k = for_attention(rotate(q, cos, sin)), rotate(k, cos, sin)
    entries = for_cache(torch.stack((k, v), dim=1))
    context.export.begin(entries)
    entries = context.gather(entries)

    out = torch.empty_like(q, dtype=x.dtype)
    group = spec.num_heads // spec.num_kv_heads
    for span, parts in context.portion.parts:
        cached = _with_cached(entries, span, context)
        step = max(1, heads_at_once(spec.num_heads, span.num_tokens, spec.head_dim) // group)
        for head in range(0, spec.num_kv_heads if parts else 0, step):
            heads = slice(head * group, (head + step) * group)
            keys, values = (
                for_attention(cached[:, i, head : head + step]).repeat_interleave(group, dim=1)
                for i in (0, 1)
            )
            for part in parts:
                rows, seen = part.rows, span.start + part.first + part.count
                attended = attend(q[rows, heads], keys[:seen], values[:seen], spec.softmax_scale)
                out[rows, heads] = attended
    return out.flatten(1)


def _with_cached(entries: Tensor, span: SequenceSpan, context: Context) -> Tensor:
    """The sequence's entries from its beginning on: those in the pages, then the batch's."""
    new = entries[span.first_row : span.first_row + span.num_new]
    if span.start == 0:
        return new
    pages = context.pages
    blocks = span.block_ids[: -(-span.start // pages.block_tokens)]
    cached = pages.layers[context.layer].index_select(0, blocks)
    if new.dim() > 2:
        # [blocks, 2, block tokens, heads, dim]: the token comes second.
        cached = cached.transpose(1, 2)
    return torch.cat((cached.flatten(0, 1)[: span.start].to(new.device), new))
