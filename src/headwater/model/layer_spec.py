"""What a model's layers are made of: plain frozen values, without weights and without torch.

Owns the vocabulary (attention, feed-forward, rope, quantisation); the families fill it in from
config.json, and the torch code and the KV layout read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.kv.layout import KvKind

FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over `dim` elements of a head.

    `kind` default: frequencies theta^(-2i/dim). linear: those divided by `factor`. yarn: a blend
    of both between the dimensions that turn `beta_fast` and `beta_slow` times within
    `original_context_tokens`. `amplitude` multiplies cosine and sine. `is_interleaved` pairs
    elements (2i, 2i+1) instead of (i, i + dim/2).
    """

    kind: Literal["default", "linear", "yarn"]
    dim: int
    theta: float
    is_interleaved: bool = False
    factor: float = 1.0
    original_context_tokens: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_range_truncated: bool = True
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Grouped-query attention; with `has_qk_norm`, queries and keys are normalised per head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    softmax_scale: float
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention; `q_lora_rank` None means that queries are not compressed."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps per token: the part of a KvLayout that the model sets.

    GQA: a key and a value of [num_kv_heads, head_dim]. MLA: one vector of [head_dim], the latent
    followed by the rotary key.
    """

    kind: KvKind
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DenseFfnSpec:
    """One gated feed-forward network (SiLU)."""

    intermediate_size: int


@dataclass(frozen=True, slots=True)
class MoeFfnSpec:
    """Routed experts, plus one always-active shared network when its size is not zero.

    `gate` softmax: the most probable experts. sigmoid_bias_group: experts are chosen by sigmoid
    score plus a learnt bias, within the `groups_per_token` groups (of `num_groups`) whose two best
    experts score highest; the weights are the scores without the bias. With `is_normalized` the
    chosen weights are divided by their sum; then all are multiplied by `routed_scale`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    gate: Literal["softmax", "sigmoid_bias_group"]
    is_normalized: bool
    routed_scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    attention: GqaSpec | MlaSpec
    ffn: DenseFfnSpec | MoeFfnSpec

    @property
    def kv(self) -> KvShape:
        """What the layer keeps per token."""
        if isinstance(self.attention, GqaSpec):
            return KvShape(KvKind.GQA, self.attention.num_kv_heads, self.attention.head_dim)
        return KvShape(KvKind.MLA, 1, self.attention.kv_lora_rank + self.attention.rope_dim)


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How linear weights are stored.

    none: BF16. fp8: E4M3 with one FP32 scale per 128 x 128 block, except the modules that
    `unconverted_modules` names by full path, leading path or trailing path.
    """

    kind: Literal["none", "fp8"] = "none"
    unconverted_modules: tuple[str, ...] = ()

    def is_fp8(self, module: str) -> bool:
        """Whether the linear `module`, such as model.layers.0.mlp.up_proj, is stored in FP8."""
        if self.kind == "none":
            return False
        dotted = f".{module}."
        return not any(
            dotted.startswith(f".{name}.") or dotted.endswith(f".{name}.")
            for name in self.unconverted_modules
        )
