"""Builds a native decoder from a ModelSpec and its weights, part by part."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater import _native
from headwater.kernels.matrix import Matrix
from headwater.kernels.stored import stored_matrix
from headwater.model.layer_spec import (
    DenseFfnSpec,
    GqaSpec,
    LayerSpec,
    MlaSpec,
    MoeFfnSpec,
    RopeSpec,
)
from headwater.model.rope import rope_frequencies
from headwater.model.source import Weights
from headwater.model.spec import ModelSpec

# gate_up of sharded experts: [experts, shards, 2, rows, columns].
_SHARDED_DIMENSIONS = 5


class DecoderParts:
    """Makes the parts of one model; as long as it lives, so does the memory that they point to."""

    def __init__(self, weights: Weights, compute: _native.Compute) -> None:
        self._weights = weights
        self._compute = compute
        self._kept: list[Tensor | Matrix] = []
        self._rotaries: dict[RopeSpec, _native.Rotary] = {}

    def decoder(self, spec: ModelSpec) -> _native.Decoder:
        """The whole model. Raises ConfigError on what the kernels do not know."""
        layers = [
            self._layer(f"layers.{index}", layer, spec.norm_eps)
            for index, layer in enumerate(spec.layers)
        ]
        embedding = self._matrix("embed")
        return _native.Decoder(
            self._compute,
            embedding,
            layers,
            self._norm("final_norm", spec.norm_eps),
            embedding if spec.is_embedding_tied else self._matrix("lm_head"),
        )

    def _layer(self, name: str, spec: LayerSpec, eps: float) -> _native.DecoderLayer:
        attention: _native.GqaAttention | _native.MlaAttention
        if isinstance(spec.attention, GqaSpec):
            attention = self._gqa(f"{name}.attention", spec.attention, eps)
        else:
            attention = self._mla(f"{name}.attention", spec.attention, eps)
        if isinstance(spec.ffn, DenseFfnSpec):
            ffn = _native.FeedForward.dense(self._compute, *self._network(f"{name}.ffn"))
        else:
            ffn = self._routed(name, spec.ffn)
        return _native.DecoderLayer(
            self._norm(f"{name}.attention_norm", eps),
            attention,
            self._norm(f"{name}.ffn_norm", eps),
            ffn,
        )

    def _gqa(self, name: str, spec: GqaSpec, eps: float) -> _native.GqaAttention:
        return _native.GqaAttention(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            softmax_scale=spec.softmax_scale,
            q=self._matrix(f"{name}.q"),
            k=self._matrix(f"{name}.k"),
            v=self._matrix(f"{name}.v"),
            o=self._matrix(f"{name}.o"),
            q_norm=self._norm(f"{name}.q_norm", eps) if spec.has_qk_norm else None,
            k_norm=self._norm(f"{name}.k_norm", eps) if spec.has_qk_norm else None,
            rotary=self._rotary(spec.rope),
        )

    def _mla(self, name: str, spec: MlaSpec, eps: float) -> _native.MlaAttention:
        is_compressed = spec.q_lora_rank is not None
        return _native.MlaAttention(
            num_heads=spec.num_heads,
            latent_dim=spec.kv_lora_rank,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            value_dim=spec.v_dim,
            softmax_scale=spec.softmax_scale,
            q_a=self._matrix(f"{name}.q_a") if is_compressed else None,
            q_a_norm=self._norm(f"{name}.q_a_norm", eps) if is_compressed else None,
            q=self._matrix(f"{name}.{'q_b' if is_compressed else 'q'}"),
            kv_a=self._matrix(f"{name}.kv_a"),
            kv_a_norm=self._norm(f"{name}.kv_a_norm", eps),
            kv_b=self._float_matrix(f"{name}.kv_b"),
            o=self._matrix(f"{name}.o"),
            rotary=self._rotary(spec.rope),
        )

    def _routed(self, name: str, spec: MoeFfnSpec) -> _native.FeedForward:
        has_shared = spec.shared_intermediate_size > 0
        gate = _native.Gate(
            matrix=self._float_matrix(f"{name}.gate"),
            bias=self._floats(f"{name}.gate.bias") if spec.has_bias else 0,
            experts_per_token=spec.experts_per_token,
            num_groups=spec.num_groups,
            groups_per_token=spec.groups_per_token,
            is_normalized=spec.is_normalized,
            scale=spec.routed_scale,
        )
        stack = self._weights.tensor(f"{name}.experts.gate_up").shape
        return _native.FeedForward.routed(
            self._compute,
            gate,
            self._matrix(f"{name}.experts.gate_up"),
            self._matrix(f"{name}.experts.down"),
            stack[1] if len(stack) == _SHARDED_DIMENSIONS else 1,
            self._network(f"{name}.shared") if has_shared else None,
        )

    def _network(self, name: str) -> tuple[_native.Matrix, _native.Matrix, _native.Matrix]:
        gate, up, down = (self._matrix(f"{name}.{part}") for part in ("gate", "up", "down"))
        return gate, up, down

    def _matrix(self, name: str) -> _native.Matrix:
        """The linear weight `name` in its format; of a stack, the first member."""
        matrix = stored_matrix(self._weights, name)
        self._kept.append(matrix)
        return matrix.native

    def _float_matrix(self, name: str) -> _native.FloatMatrix:
        """The weight `name`, to be multiplied with activations in FP32."""
        weight = self._weights.tensor(name)
        if weight.dtype != torch.float32:
            return _native.FloatMatrix.stored(self._matrix(name))
        self._kept.append(weight)
        rows, columns = weight.shape
        return _native.FloatMatrix.floats(rows, columns, weight.data_ptr())

    def _norm(self, name: str, eps: float) -> _native.RmsNorm:
        size = self._weights.tensor(name).numel()
        return _native.RmsNorm(self._floats(name), size, eps)

    def _floats(self, name: str) -> int:
        """Address of the small tensor `name` in FP32."""
        tensor = self._weights.tensor(name).float()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _rotary(self, spec: RopeSpec) -> _native.Rotary:
        if spec not in self._rotaries:
            frequencies: list[float] = rope_frequencies(spec).tolist()
            self._rotaries[spec] = _native.Rotary(frequencies, spec.amplitude, spec.is_interleaved)
        return self._rotaries[spec]
