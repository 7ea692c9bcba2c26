"""Multi-head latent attention over the paged KV store, in its absorbed form.

The cache holds one latent and one rotary key per token. Instead of rebuilding each head's keys and
values from all latents, a head's queries are taken to the latent space, and what they attend to is
taken back: the same sums in another order, with memory that does not grow with heads x context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kv.pages import KvPages
from headwater.model.attention import causal_chunks, causal_softmax
from headwater.model.batch import Batch, SequenceSpan
from headwater.model.layer_spec import MlaSpec
from headwater.model.linear import round_activations
from headwater.model.rope import RotaryTable
from headwater.model.source import WeightSource


class MlaAttention:
    """The attention of one layer."""

    def __init__(
        self, spec: MlaSpec, layer: int, source: WeightSource, rotary: RotaryTable
    ) -> None:
        self._spec = spec
        self._layer = layer
        self._rotary = rotary
        if spec.q_lora_rank is None:
            self._q, self._q_norm, self._q_a = source.matrix("q"), None, None
        else:
            self._q, self._q_norm = source.matrix("q_b"), source.norm("q_a_norm")
            self._q_a = source.matrix("q_a")
        self._kv_a = source.matrix("kv_a")
        self._kv_a_norm = source.norm("kv_a_norm")
        self._kv_b = source.matrix("kv_b")
        self._kv_b.reserve_rows(spec.nope_dim + spec.v_dim)
        self._o = source.matrix("o")

    def __call__(self, x: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """Normalised hidden states, FP32 [T, hidden] -> FP32 [T, hidden]; writes the new KV."""
        spec = self._spec
        x = round_activations(x)
        compressed = x
        if self._q_a is not None and self._q_norm is not None:
            compressed = round_activations(self._q_norm(self._q_a.matmul(x)))
        queries = self._q.matmul(compressed).view(x.shape[0], spec.num_heads, -1)
        q_nope, q_rope = torch.split(queries, [spec.nope_dim, spec.rope_dim], dim=-1)
        latent, k_rope = torch.split(
            self._kv_a.matmul(x), [spec.kv_lora_rank, spec.rope_dim], dim=-1
        )
        cos, sin = self._rotary.rows(batch.positions, batch.max_position)
        q_rope = self._rotary.rotate(q_rope, cos, sin)
        k_rope = self._rotary.rotate(k_rope[:, None], cos, sin)[:, 0]
        entries = torch.cat((self._kv_a_norm(latent), k_rope), dim=-1)
        pages.write_mla(self._layer, batch.blocks, batch.offsets, entries)

        # Per head: [T, nope] x [nope, rank], with the head's rows of kv_b at hand only once each
        # time; queries come out as [T, heads, rank + rope], to meet cached entries directly.
        absorbed = x.new_empty(x.shape[0], spec.num_heads, spec.kv_lora_rank + spec.rope_dim)
        absorbed[..., spec.kv_lora_rank :] = q_rope
        for head in range(spec.num_heads):
            first = head * (spec.nope_dim + spec.v_dim)
            key_rows = self._kv_b.expand(first, first + spec.nope_dim)
            absorbed[:, head, : spec.kv_lora_rank] = torch.mm(q_nope[:, head], key_rows)
        absorbed *= spec.softmax_scale

        attended = torch.cat(
            [
                self._attend(absorbed[span.first_row : span.first_row + span.num_new], span, pages)
                for span in batch.spans
            ]
        )
        outputs = x.new_empty(x.shape[0], spec.num_heads, spec.v_dim)
        for head in range(spec.num_heads):
            first = head * (spec.nope_dim + spec.v_dim) + spec.nope_dim
            value_rows = self._kv_b.expand(first, first + spec.v_dim)
            outputs[:, head] = torch.mm(attended[:, head], value_rows.t())
        return self._o.matmul(round_activations(outputs.flatten(1)))

    def _attend(self, queries: Tensor, span: SequenceSpan, pages: KvPages) -> Tensor:
        """Scaled queries [n, heads, rank + rope] -> mean latents [n, heads, rank]."""
        spec = self._spec
        entries = pages.read_mla(self._layer, span.block_ids, span.num_tokens)
        latents = entries[:, : spec.kv_lora_rank]
        outputs = []
        for first, stop, num_keys in causal_chunks(span.num_new, span.start, spec.num_heads):
            count = stop - first
            rows = queries[first:stop].transpose(0, 1).reshape(spec.num_heads * count, -1)
            scores = torch.mm(rows, entries[:num_keys].t())
            weights = causal_softmax(scores.view(-1, count, num_keys), count)
            output = torch.mm(weights.view_as(scores), latents[:num_keys])
            outputs.append(output.view(spec.num_heads, count, -1).transpose(0, 1))
        return torch.cat(outputs)
