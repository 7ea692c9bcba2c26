"""The published shapes, and how they are cut to fewer layers and experts.

Owns the config.json of a synthetic checkpoint, its quantisation aside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.errors import ConfigError

Settings = dict[str, Any]

_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": 256}

_DEEPSEEK_V3: Settings = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}

_KIMI_K2: Settings = _DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": _DEEPSEEK_V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1},
}

_QWEN3_235B: Settings = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}

_QWEN3_30B: Settings = _QWEN3_235B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}

_MIXTRAL_8X7B: Settings = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

_TINY: Settings = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
_TINY_DEEPSEEK: Settings = {
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "rope_scaling": _DEEPSEEK_V3["rope_scaling"]
    | {"factor": 4.0, "original_max_position_embeddings": 1024},
}
_TINY_QWEN: Settings = {
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
_TINY_MIXTRAL: Settings = {"intermediate_size": 256, "head_dim": 64}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """`experts_field` names the number of experts in the config."""

    experts_field: str
    shapes: dict[str, Settings]


ARCHITECTURES = {
    "deepseek_v3": _Architecture(
        "n_routed_experts",
        {
            "deepseek-v3": _DEEPSEEK_V3,
            "kimi-k2": _KIMI_K2,
            "tiny": _DEEPSEEK_V3 | _TINY | _TINY_DEEPSEEK,
        },
    ),
    "qwen3_moe": _Architecture(
        "num_experts",
        {
            "qwen3-235b": _QWEN3_235B,
            "qwen3-30b": _QWEN3_30B,
            "tiny": _QWEN3_235B | _TINY | _TINY_QWEN,
        },
    ),
    "mixtral": _Architecture(
        "num_local_experts",
        {"mixtral-8x7b": _MIXTRAL_8X7B, "tiny": _MIXTRAL_8X7B | _TINY | _TINY_MIXTRAL},
    ),
}

SHAPES = sorted({shape for arch in ARCHITECTURES.values() for shape in arch.shapes})


def make_config(
    shape: str,
    architecture: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
) -> Settings:
    """The config.json of `shape`, cut to `layers` and with another number of experts.

    The architecture follows from the shape; only for "tiny" it has to be said. Of the dense first
    layers the published share stays, at least one where there is more than one layer.

    Raises ConfigError for an unknown shape, one of another architecture, or numbers out of range.
    """
    fitting = [name for name, arch in ARCHITECTURES.items() if shape in arch.shapes]
    if not fitting:
        raise ConfigError(f"--shape: must be one of {', '.join(SHAPES)}, got {shape!r}")
    if architecture is None:
        if len(fitting) > 1:
            raise ConfigError(
                f"--arch: is missing; shape {shape} is there for {', '.join(fitting)}"
            )
        architecture = fitting[0]
    elif architecture not in fitting:
        raise ConfigError(
            f"--arch: is {architecture!r}, but the shape {shape} belongs to {', '.join(fitting)}"
        )
    arch = ARCHITECTURES[architecture]
    config = arch.shapes[shape] | _SPECIAL_TOKENS | {"torch_dtype": "bfloat16"}
    if layers is not None:
        _cut_layers(config, layers)
    if experts is not None:
        _set_experts(config, arch.experts_field, experts)
    return config


def _cut_layers(config: Settings, layers: int) -> None:
    published = config["num_hidden_layers"]
    if layers < 1:
        raise ConfigError(f"--layers: must be at least 1, got {layers}")
    config["num_hidden_layers"] = layers
    if "first_k_dense_replace" in config:
        share = round(config["first_k_dense_replace"] * layers / published)
        config["first_k_dense_replace"] = max(1, share) if layers > 1 else 0


def _set_experts(config: Settings, field: str, experts: int) -> None:
    if experts < 2:
        raise ConfigError(f"--experts: must be at least 2, got {experts}")
    config[field] = experts
    top_k = config["num_experts_per_tok"] = min(config["num_experts_per_tok"], experts)
    if "n_group" in config:
        # Groups of at least two experts; those that a token may use must hold enough of them.
        groups = config["n_group"]
        while groups > 1 and (experts % groups or experts // groups < 2):
            groups //= 2
        used = min(config["topk_group"], groups)
        while used < groups and used * (experts // groups) < top_k:
            used += 1
        config["n_group"], config["topk_group"] = groups, used
