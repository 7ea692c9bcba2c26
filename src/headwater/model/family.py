"""The shape of a model family: the one interface that each family file fills in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.model.checkpoint_names import CheckpointNames
from headwater.model.config_fields import ConfigFields
from headwater.model.layer_spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The fields of config.json that all families share and that layers depend on."""

    hidden_size: int
    num_layers: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config.json becomes layers, and how its checkpoint is spelt."""

    architecture: str
    read_layers: Callable[[ConfigFields, Dimensions], tuple[LayerSpec, ...]]
    names: CheckpointNames


def require_plain(fields: ConfigFields) -> None:
    """Refuses what no family here supports: biases in attention, activations other than SiLU."""
    fields.require("attention_bias", False)
    fields.require("hidden_act", "silu")


def read_head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    """`head_dim`, an even number; where absent, the hidden size divided among the heads."""
    if not fields.has("head_dim") and hidden_size % num_heads:
        fields.fail(
            "num_attention_heads",
            f"is {num_heads}, must divide hidden_size ({hidden_size}) where head_dim is absent",
        )
    head_dim = fields.integer("head_dim", 2, 4096, default=hidden_size // num_heads)
    if head_dim % 2:
        fields.fail("head_dim", f"is {head_dim}, must be even")
    return head_dim


def read_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    """`num_key_value_heads`, a divisor of the number of heads."""
    num_kv_heads = fields.integer(
        "num_key_value_heads", high=num_heads, high_name="num_attention_heads"
    )
    if num_heads % num_kv_heads:
        fields.fail(
            "num_key_value_heads",
            f"is {num_kv_heads}, must divide num_attention_heads ({num_heads})",
        )
    return num_kv_heads
