"""What a model's layers are made of: plain frozen values, without weights and without torch.

Owns the vocabulary (attention, feed-forward, rope, quantisation); the families fill it in from
config.json, and the torch code and the KV layout read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headwater.kv.layout import KvKind

FP8_BLOCK = 128
MXFP4_GROUP = 32
INT4_GROUPS = (32, 64, 128)


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

    @property
    def has_bias(self) -> bool:
        """Whether the gate has a bias."""
        return self.gate == "sigmoid_bias_group"


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


LinearFormat = Literal["bf16", "fp8", "int4", "mxfp4"]
"""How one linear weight is stored; see stored_fields.py."""


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How linear weights are stored.

    none: BF16. fp8: E4M3 with one FP32 scale per 128 x 128 block. int4: codes with one scale, and
    with `has_zeros` one zero point, per `group` columns of a row. mxfp4: E2M1 codes with one E8M0
    scale per 32 columns. `packing` is the order in which a checkpoint holds int4 codes.

    `converted_modules` names the modules that are quantised, none meaning all linear ones, and
    `unconverted_modules` those that are not: a name is a regular expression for the beginning of
    the module's path after "re:", and else some whole components of the path in a row.
    """

    kind: Literal["none", "fp8", "int4", "mxfp4"] = "none"
    unconverted_modules: tuple[str, ...] = ()
    converted_modules: tuple[str, ...] = ()
    group: int = 0
    has_zeros: bool = False
    packing: Literal["rows", "awq", "gptq", "gptq_v2"] = "rows"

    def format_of(self, module: str) -> LinearFormat:
        """The format of the linear `module`, such as model.layers.0.mlp.up_proj."""
        if self.kind == "none" or any(_names(n, module) for n in self.unconverted_modules):
            return "bf16"
        is_target = not self.converted_modules or any(
            _names(name, module) for name in self.converted_modules
        )
        return self.kind if is_target else "bf16"


def _names(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return f".{name}." in f".{module}."
