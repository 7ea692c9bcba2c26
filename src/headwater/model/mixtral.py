"""Mixtral: plain grouped-query attention and a softmax gate; also what `convert` writes."""

from __future__ import annotations

from headwater.model.checkpoint_names import CheckpointNames
from headwater.model.config_fields import ConfigFields
from headwater.model.family import (
    Dimensions,
    Family,
    read_head_dim,
    read_kv_heads,
    require_plain,
)
from headwater.model.layer_spec import GqaSpec, LayerSpec, MoeFfnSpec
from headwater.model.rope_config import read_rope


def _read_layers(fields: ConfigFields, dims: Dimensions) -> tuple[LayerSpec, ...]:
    require_plain(fields)
    if fields.has("sliding_window"):
        fields.fail(
            "sliding_window",
            f"is {fields.integer('sliding_window')}, and only null (attention to the whole context)"
            " is supported",
        )
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    head_dim = read_head_dim(fields, dims.hidden_size, num_heads)
    attention = GqaSpec(
        num_heads=num_heads,
        num_kv_heads=read_kv_heads(fields, num_heads),
        head_dim=head_dim,
        has_qk_norm=False,
        softmax_scale=head_dim**-0.5,
        rope=read_rope(fields, head_dim, dims.max_context_tokens),
    )
    num_experts = fields.integer("num_local_experts", 1, 1 << 16)
    moe = MoeFfnSpec(
        num_experts=num_experts,
        experts_per_token=fields.integer(
            "num_experts_per_tok", high=num_experts, high_name="num_local_experts"
        ),
        intermediate_size=fields.integer("intermediate_size"),
        gate="softmax",
        is_normalized=True,
    )
    return (LayerSpec(attention, moe),) * dims.num_layers


FAMILY = Family(
    "MixtralForCausalLM",
    _read_layers,
    CheckpointNames("block_sparse_moe", expert_gate="w1", expert_up="w3", expert_down="w2"),
)
