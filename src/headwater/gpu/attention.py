"""Attention of a layer over whole prompts: MLA with keys and values rebuilt, and GQA.

Owns the order of operations on the device; what was cached before comes from the pool's pages, and
what is new is read back as it is stored, in BF16, so that a prompt cut in two computes the same.
Queries, keys and values meet in FP16: three more bits than BF16 has, in a range that they never
leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu.memory_plan import SLICE_TOKENS, heads_at_once
from headwater.gpu.softmax_attention import attend
from headwater.model.layer_spec import GqaSpec, MlaSpec

if TYPE_CHECKING:
    from headwater.gpu.dense import DenseWeights
    from headwater.gpu.kv_export import KvExport
    from headwater.gpu.positions import Positions
    from headwater.kv.pages import KvPages
    from headwater.model.batch import Batch, SequenceSpan


def add_attention(
    spec: GqaSpec | MlaSpec,
    layer: int,
    hidden: Tensor,
    weights: DenseWeights,
    batch: Batch,
    positions: Positions,
    pages: KvPages,
    export: KvExport,
) -> None:
    """hidden, FP32 [T, hidden], += attention(norm(hidden)); begins to export the new entries."""
    x = normalised(hidden, weights, "attention_norm")
    attend_spans = _mla if isinstance(spec, MlaSpec) else _gqa
    attended = attend_spans(spec, layer, x, weights, batch, positions, pages, export)  # type: ignore[arg-type]
    output = weights.matrix("attention.o")
    for first in range(0, x.shape[0], SLICE_TOKENS):
        stop = first + SLICE_TOKENS
        hidden[first:stop] += output.product(attended[first:stop])


def normalised(hidden: Tensor, weights: DenseWeights, name: str) -> Tensor:
    """norm(hidden) in BF16 [T, hidden]."""
    out = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
    for first in range(0, hidden.shape[0], SLICE_TOKENS):
        stop = first + SLICE_TOKENS
        out[first:stop] = weights.norm(name, hidden[first:stop])
    return out


def _mla(
    spec: MlaSpec,
    layer: int,
    x: Tensor,
    weights: DenseWeights,
    batch: Batch,
    positions: Positions,
    pages: KvPages,
    export: KvExport,
) -> Tensor:
    """BF16 [T, hidden] -> BF16 [T, heads * v]."""
    cos, sin = positions.angles(spec.rope)
    rotate = positions.table(spec.rope).rotate
    compressed, q_name = x, "attention.q"
    if spec.q_lora_rank is not None:
        low = weights.matrix("attention.q_a").product(x)
        compressed, q_name = weights.norm("attention.q_a_norm", low).bfloat16(), "attention.q_b"
    latent, k_rope = (
        weights.matrix("attention.kv_a")
        .product(x)
        .split([spec.kv_lora_rank, spec.rope_dim], dim=-1)
    )
    k_rope = rotate(k_rope[:, None], cos, sin)[:, 0]
    latent = weights.norm("attention.kv_a_norm", latent)
    entries = torch.cat((latent, k_rope), dim=-1).bfloat16()
    export.begin(entries)

    q_size, kv_size = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.v_dim
    q_matrix, kv_matrix = weights.matrix(q_name), weights.matrix("attention.kv_b")
    out = torch.empty(x.shape[0], spec.num_heads, spec.v_dim, dtype=torch.bfloat16, device=x.device)
    for span in batch.spans:
        mine = slice(span.first_row, span.first_row + span.num_new)
        keys = _with_cached(entries[mine], layer, span, pages)
        step = heads_at_once(spec.num_heads, span.num_tokens, q_size)
        for head in range(0, spec.num_heads, step):
            stop = min(head + step, spec.num_heads)
            q = q_matrix.rows(head * q_size, stop * q_size).product(compressed[mine])
            q = q.view(span.num_new, -1, q_size)
            rotated = rotate(q[..., spec.nope_dim :], cos[mine], sin[mine])
            q = torch.cat((q[..., : spec.nope_dim].half(), rotated.half()), dim=-1)
            latents = keys[:, : spec.kv_lora_rank]
            kv = kv_matrix.rows(head * kv_size, stop * kv_size).product(latents).half()
            kv = kv.view(span.num_tokens, -1, kv_size)
            shared = keys[:, None, spec.kv_lora_rank :].half().expand(-1, stop - head, -1)
            k = torch.cat((kv[..., : spec.nope_dim], shared), dim=-1)
            attended = attend(q, k, kv[..., spec.nope_dim :], spec.softmax_scale)
            out[mine, head:stop] = attended
    return out.flatten(1)


def _gqa(
    spec: GqaSpec,
    layer: int,
    x: Tensor,
    weights: DenseWeights,
    batch: Batch,
    positions: Positions,
    pages: KvPages,
    export: KvExport,
) -> Tensor:
    """BF16 [T, hidden] -> BF16 [T, heads * head_dim]."""
    cos, sin = positions.angles(spec.rope)
    rotate = positions.table(spec.rope).rotate
    q, k, v = (
        weights.matrix(f"attention.{name}").product(x).view(x.shape[0], -1, spec.head_dim)
        for name in "qkv"
    )
    if spec.has_qk_norm:
        q = weights.norm("attention.q_norm", q)
        k = weights.norm("attention.k_norm", k)
    q, k = rotate(q, cos, sin).half(), rotate(k, cos, sin)
    entries = torch.stack((k, v), dim=1).bfloat16()
    export.begin(entries)

    out = torch.empty_like(q, dtype=torch.bfloat16)
    group = spec.num_heads // spec.num_kv_heads
    for span in batch.spans:
        mine = slice(span.first_row, span.first_row + span.num_new)
        cached = _with_cached(entries[mine], layer, span, pages)
        step = max(1, heads_at_once(spec.num_heads, span.num_tokens, spec.head_dim) // group)
        for head in range(0, spec.num_kv_heads, step):
            heads = slice(head * group, (head + step) * group)
            keys, values = (
                cached[:, i, head : head + step].half().repeat_interleave(group, dim=1)
                for i in (0, 1)
            )
            out[mine, heads] = attend(q[mine, heads], keys, values, spec.softmax_scale)
    return out.flatten(1)


def _with_cached(new: Tensor, layer: int, span: SequenceSpan, pages: KvPages) -> Tensor:
    """The sequence's entries from its beginning on: those in the pages, then the new ones."""
    if span.start == 0:
        return new
    blocks = span.block_ids[: -(-span.start // pages.block_tokens)]
    cached = pages.layers[layer].index_select(0, blocks)
    if new.dim() > 2:
        # [blocks, 2, block tokens, heads, dim]: the token comes second.
        cached = cached.transpose(1, 2)
    return torch.cat((cached.flatten(0, 1)[: span.start].to(new.device), new))
