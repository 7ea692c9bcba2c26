"""Qwen3-MoE: grouped-query attention with normalised queries and keys, and a softmax gate."""

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
from headwater.model.layer_spec import DenseFfnSpec, GqaSpec, LayerSpec, MoeFfnSpec
from headwater.model.rope_config import read_rope


def _read_layers(fields: ConfigFields, dims: Dimensions) -> tuple[LayerSpec, ...]:
    require_plain(fields)
    fields.require("use_sliding_window", False)
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    head_dim = read_head_dim(fields, dims.hidden_size, num_heads)
    attention = GqaSpec(
        num_heads=num_heads,
        num_kv_heads=read_kv_heads(fields, num_heads),
        head_dim=head_dim,
        has_qk_norm=True,
        softmax_scale=head_dim**-0.5,
        rope=read_rope(fields, head_dim, dims.max_context_tokens),
    )
    # transformers 5 writes num_local_experts where published checkpoints have num_experts.
    count_field = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(count_field, 1, 1 << 16)
    moe = MoeFfnSpec(
        num_experts=num_experts,
        experts_per_token=fields.integer(
            "num_experts_per_tok", high=num_experts, high_name=count_field
        ),
        intermediate_size=fields.integer("moe_intermediate_size"),
        gate="softmax",
        is_normalized=fields.boolean("norm_topk_prob"),
    )
    dense_layers = fields.integers("mlp_only_layers", 0, dims.num_layers - 1)
    sparse_step = fields.integer("decoder_sparse_step", default=1)
    is_moe = [
        index not in dense_layers and (index + 1) % sparse_step == 0
        for index in range(dims.num_layers)
    ]
    if all(is_moe):
        return (LayerSpec(attention, moe),) * dims.num_layers
    dense = DenseFfnSpec(fields.integer("intermediate_size"))
    return tuple(LayerSpec(attention, moe if routed else dense) for routed in is_moe)


FAMILY = Family("Qwen3MoeForCausalLM", _read_layers, CheckpointNames())
