"""The whole model in plain torch: the reference that every faster path is held against.

Owns the residual stream (FP32) and the order of operations; state lives in the KV pages that the
caller passes in. Callers run it under torch.inference_mode, from one thread at a time.
"""

from __future__ import annotations

from torch import Tensor

from headwater.kv.pages import KvPages
from headwater.model.batch import Batch
from headwater.model.ffn import DenseFfn
from headwater.model.gqa import GqaAttention
from headwater.model.layer_spec import DenseFfnSpec, GqaSpec, LayerSpec, RopeSpec
from headwater.model.linear import Scratch, round_activations
from headwater.model.mla import MlaAttention
from headwater.model.moe import MoeFfn
from headwater.model.rope import RotaryTable
from headwater.model.source import Weights, WeightSource
from headwater.model.spec import ModelSpec


class Transformer:
    """A decoder-only model over `weights`, which it keeps alive and never copies."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        source = WeightSource(weights, Scratch(), spec.norm_eps)
        tables: dict[RopeSpec, RotaryTable] = {}
        self._embed = source.tensor("embed")
        self._layers = [
            _Layer(index, layer, source.below(f"layers.{index}"), tables)
            for index, layer in enumerate(spec.layers)
        ]
        self._final_norm = source.norm("final_norm")
        self._lm_head = source.matrix("embed" if spec.is_embedding_tied else "lm_head")

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] -> hidden states before the first layer, FP32 [T, hidden]."""
        return self._embed[token_ids].float()

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """One layer, FP32 [T, hidden] -> FP32 [T, hidden]; writes the layer's KV into `pages`."""
        return self._layers[index](hidden, batch, pages)

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """All layers over the batch's tokens: hidden states before the final norm, [T, hidden]."""
        hidden = self.embed(batch.token_ids)
        for index in range(self.spec.num_layers):
            hidden = self.forward_layer(index, hidden, batch, pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer, FP32 [n, hidden] -> FP32 [n, vocabulary]."""
        return self._lm_head.matmul(round_activations(self._final_norm(hidden)))


class _Layer:
    def __init__(
        self, index: int, spec: LayerSpec, source: WeightSource, tables: dict[RopeSpec, RotaryTable]
    ) -> None:
        rope = spec.attention.rope
        if rope not in tables:
            tables[rope] = RotaryTable(rope)
        rotary = tables[rope]
        self._attention_norm = source.norm("attention_norm")
        self._attention: GqaAttention | MlaAttention
        attention_source = source.below("attention")
        if isinstance(spec.attention, GqaSpec):
            self._attention = GqaAttention(spec.attention, index, attention_source, rotary)
        else:
            self._attention = MlaAttention(spec.attention, index, attention_source, rotary)
        self._ffn_norm = source.norm("ffn_norm")
        self._ffn: DenseFfn | MoeFfn
        if isinstance(spec.ffn, DenseFfnSpec):
            self._ffn = DenseFfn(source.below("ffn"))
        else:
            self._ffn = MoeFfn(spec.ffn, source)

    def __call__(self, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        hidden = hidden + self._attention(self._attention_norm(hidden), batch, pages)
        return hidden.add_(self._ffn(self._ffn_norm(hidden)))
