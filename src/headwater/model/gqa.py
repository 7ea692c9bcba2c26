"""Grouped-query attention over the paged KV store."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kv.pages import KvPages
from headwater.model.attention import causal_chunks, causal_softmax
from headwater.model.batch import Batch, SequenceSpan
from headwater.model.layer_spec import GqaSpec
from headwater.model.linear import round_activations
from headwater.model.rope import RotaryTable
from headwater.model.source import WeightSource


class GqaAttention:
    """The attention of one layer; the query heads of a KV head are neighbours."""

    def __init__(
        self, spec: GqaSpec, layer: int, source: WeightSource, rotary: RotaryTable
    ) -> None:
        self._spec = spec
        self._layer = layer
        self._rotary = rotary
        self._q, self._k, self._v, self._o = (source.matrix(name) for name in "qkvo")
        self._q_norm = source.norm("q_norm") if spec.has_qk_norm else None
        self._k_norm = source.norm("k_norm") if spec.has_qk_norm else None

    def __call__(self, x: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """Normalised hidden states, FP32 [T, hidden] -> FP32 [T, hidden]; writes the new KV."""
        spec = self._spec
        num_tokens = x.shape[0]
        x = round_activations(x)
        queries = self._q.matmul(x).view(num_tokens, spec.num_heads, spec.head_dim)
        keys = self._k.matmul(x).view(num_tokens, spec.num_kv_heads, spec.head_dim)
        values = self._v.matmul(x).view(num_tokens, spec.num_kv_heads, spec.head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            queries, keys = self._q_norm(queries), self._k_norm(keys)
        cos, sin = self._rotary.rows(batch.positions, batch.max_position)
        rotated = self._rotary.rotate(torch.cat((queries, keys), dim=1), cos, sin)
        queries, keys = torch.split(rotated, [spec.num_heads, spec.num_kv_heads], dim=1)
        pages.write_gqa(self._layer, batch.blocks, batch.offsets, keys, values)
        queries = queries * spec.softmax_scale
        attended = [
            self._attend(queries[span.first_row : span.first_row + span.num_new], span, pages)
            for span in batch.spans
        ]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended)
        return self._o.matmul(round_activations(joined))

    def _attend(self, queries: Tensor, span: SequenceSpan, pages: KvPages) -> Tensor:
        """Scaled queries [n, heads, head_dim] -> [n, heads * head_dim]."""
        spec = self._spec
        keys, values = pages.read_gqa(self._layer, span.block_ids, span.num_tokens)
        group = spec.num_heads // spec.num_kv_heads
        # [kv heads, group, n, head_dim], so that a KV head meets its queries in one product.
        queries = queries.view(-1, spec.num_kv_heads, group, spec.head_dim).permute(1, 2, 0, 3)
        outputs = []
        for first, stop, num_keys in causal_chunks(span.num_new, span.start, spec.num_heads):
            count = stop - first
            rows = queries[:, :, first:stop].reshape(spec.num_kv_heads, -1, spec.head_dim)
            scores = torch.bmm(rows, keys[:, :num_keys].transpose(1, 2))
            weights = causal_softmax(scores.view(-1, count, num_keys), count)
            output = torch.bmm(weights.view_as(scores), values[:, :num_keys])
            output = output.view(spec.num_heads, count, spec.head_dim)
            outputs.append(output.transpose(0, 1).reshape(count, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
