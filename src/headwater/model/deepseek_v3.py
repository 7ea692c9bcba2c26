"""DeepSeek-V3, R1 and Kimi-K2: latent attention, and a grouped sigmoid gate with shared experts."""

from __future__ import annotations

from headwater.model.checkpoint_names import CheckpointNames
from headwater.model.config_fields import ConfigFields
from headwater.model.family import Dimensions, Family, require_plain
from headwater.model.layer_spec import DenseFfnSpec, LayerSpec, MlaSpec, MoeFfnSpec
from headwater.model.rope_config import read_rope, read_softmax_mscale


def _read_layers(fields: ConfigFields, dims: Dimensions) -> tuple[LayerSpec, ...]:
    require_plain(fields)
    # The checkpoint may also hold multi-token-prediction layers; they are not part of the model.
    num_dense = fields.integer(
        "first_k_dense_replace", 0, dims.num_layers, high_name="num_hidden_layers"
    )
    fields.require("moe_layer_freq", 1)
    attention = _read_attention(fields, dims)
    dense = DenseFfnSpec(fields.integer("intermediate_size"))
    moe = _read_moe(fields)
    return tuple(
        LayerSpec(attention, dense if index < num_dense else moe)
        for index in range(dims.num_layers)
    )


def _read_attention(fields: ConfigFields, dims: Dimensions) -> MlaSpec:
    rope_dim = fields.integer("qk_rope_head_dim", 2, 4096)
    if rope_dim % 2:
        fields.fail("qk_rope_head_dim", f"is {rope_dim}, must be even")
    nope_dim = fields.integer("qk_nope_head_dim", 1, 4096)
    rope = read_rope(
        fields,
        rope_dim,
        dims.max_context_tokens,
        is_interleaved=fields.boolean("rope_interleave", default=True),
    )
    return MlaSpec(
        num_heads=fields.integer("num_attention_heads", 1, 4096),
        q_lora_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=fields.integer("v_head_dim", 1, 4096),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * read_softmax_mscale(fields, rope),
        rope=rope,
    )


def _read_moe(fields: ConfigFields) -> MoeFfnSpec:
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    num_experts = fields.integer("n_routed_experts", 2, 1 << 16)
    num_groups = fields.integer("n_group", high=num_experts // 2, high_name="n_routed_experts / 2")
    if num_experts % num_groups:
        fields.fail("n_group", f"is {num_groups}, must divide n_routed_experts ({num_experts})")
    groups_per_token = fields.integer("topk_group", high=num_groups, high_name="n_group")
    experts_per_token = fields.integer(
        "num_experts_per_tok", high=num_experts, high_name="n_routed_experts"
    )
    reachable = groups_per_token * (num_experts // num_groups)
    if experts_per_token > reachable:
        fields.fail(
            "num_experts_per_tok",
            f"is {experts_per_token}, but the topk_group ({groups_per_token}) groups a token may"
            f" use hold {reachable} experts",
        )
    size = fields.integer("moe_intermediate_size")
    return MoeFfnSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=size,
        gate="sigmoid_bias_group",
        is_normalized=fields.boolean("norm_topk_prob"),
        routed_scale=fields.number("routed_scaling_factor", 1e-6, 1e6),
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        shared_intermediate_size=fields.integer("n_shared_experts", 0, 1024, default=0) * size,
    )


FAMILY = Family("DeepseekV3ForCausalLM", _read_layers, CheckpointNames())
