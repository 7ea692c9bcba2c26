"""ModelSpec from config.json: published forms, and one clear sentence for everything else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from headwater.errors import CheckpointError
from headwater.kv.layout import KvKind
from headwater.model.spec import GqaSpec, KvShape, MlaSpec, ModelSpec, MoeFfnSpec
from headwater.weights.tensors import DType, TensorSpec

Config = dict[str, object]


def deepseek_config(**changes: object) -> Config:
    """As DeepSeek-V3 is published, with fewer layers and experts."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    } | changes


def qwen_config(**changes: object) -> Config:
    """As Qwen3-30B-A3B is published, with fewer layers and experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | changes


def mixtral_config(**changes: object) -> Config:
    """As Mixtral-8x7B is published, with fewer layers."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    } | changes


MAKERS: dict[str, Callable[..., Config]] = {
    "deepseek": deepseek_config,
    "qwen": qwen_config,
    "mixtral": mixtral_config,
}


def read(config: Config) -> ModelSpec:
    return ModelSpec.from_config(config, "config.json")


def tensors_of(config: Config) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in read(config).tensors()}


def test_needs_no_torch() -> None:
    code = (
        "import sys, headwater.model.spec; sys.exit(not {'torch', 'grpc'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_deepseek_v3() -> None:
    spec = read(deepseek_config())
    attention = spec.layers[0].attention
    assert isinstance(attention, MlaSpec)
    # 192^-0.5, times the square of 0.1 ln(40) + 1
    assert attention.softmax_scale == pytest.approx(0.07216878 * 1.36888794**2)
    assert attention.rope.is_interleaved
    assert attention.rope.amplitude == 1.0
    assert spec.kv == KvShape(KvKind.MLA, 1, 576)
    assert spec.max_context_tokens == 163840
    assert (spec.bos_token_id, spec.eos_token_ids) == (0, (1,))
    assert [isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers] == [False, True, True]
    tensors = tensors_of(deepseek_config())
    assert tensors["layers.0.attention.kv_a"].dtypes == (DType.F8_E4M3,)
    assert tensors["layers.0.attention.kv_a.scale"].shape == (5, 56)
    assert tensors["layers.2.experts.gate_up"].shape == (8, 2, 2048, 7168)
    assert tensors["layers.2.experts.gate_up.scale"].shape == (8, 2, 16, 56)
    part = tensors["layers.2.experts.gate_up"].parts[15]
    assert (part.source, part.index) == ("model.layers.2.mlp.experts.7.up_proj.weight", (7, 1))
    for name in ("embed", "lm_head", "layers.1.gate", "layers.1.attention.q_a_norm"):
        assert DType.F8_E4M3 not in tensors[name].dtypes
        assert f"{name}.scale" not in tensors
    assert not any("model.layers.3." in p.source for t in tensors.values() for p in t.parts)


def test_qwen3_moe() -> None:
    spec = read(qwen_config(mlp_only_layers=[3], decoder_sparse_step=2))
    assert [isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers] == [0, 1, 0, 0]
    assert spec.kv == KvShape(KvKind.GQA, 4, 128)
    assert spec.quant.kind == "none"
    tensors = tensors_of(qwen_config())
    assert tensors["layers.0.attention.q"].shape == (4096, 2048)
    assert tensors["layers.0.attention.q_norm"].shape == (128,)
    assert tensors["layers.0.experts.down"].dtypes == (DType.BF16,)


def test_mixtral() -> None:
    spec = read(mixtral_config(tie_word_embeddings=True))
    attention = spec.layers[0].attention
    assert isinstance(attention, GqaSpec)
    assert attention.head_dim == 128
    assert spec.eos_token_ids == (2, 3)
    tensors = tensors_of(mixtral_config(tie_word_embeddings=True))
    assert "lm_head" not in tensors
    parts = tensors["layers.1.experts.gate_up"].parts
    assert parts[0].source == "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    assert parts[1].source == "model.layers.1.block_sparse_moe.experts.0.w3.weight"
    down = tensors["layers.1.experts.down"].parts
    assert down[7].source == "model.layers.1.block_sparse_moe.experts.7.w2.weight"


def test_both_forms_of_rope_are_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    old = read(qwen_config(rope_scaling={"type": "yarn", **yarn}))
    new_config = qwen_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1000000.0, **yarn})
    del new_config["rope_theta"], new_config["rope_scaling"]
    assert read(new_config) == old
    assert old.layers[0].attention.rope.amplitude == pytest.approx(1.13862944)


def test_unconverted_modules_stay_bf16() -> None:
    quant = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.1", "self_attn.q_proj", "gate_proj_x"],
    }
    tensors = tensors_of(mixtral_config(quantization_config=quant, num_hidden_layers=11))
    is_fp8 = {name: tensor.dtypes == (DType.F8_E4M3,) for name, tensor in tensors.items()}
    assert is_fp8["layers.0.attention.k"]
    assert is_fp8["layers.10.experts.down"]
    assert not is_fp8["layers.0.attention.q"]
    assert not is_fp8["layers.1.attention.k"]
    assert not is_fp8["layers.1.experts.gate_up"]


def test_half_converted_experts_are_refused() -> None:
    quant = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.1.block_sparse_moe.experts.3.w1"],
    }
    with pytest.raises(CheckpointError, match=r"keeps model\.layers\.1\..*\.experts\.3\.w1 "):
        read(mixtral_config(quantization_config=quant)).tensors()


REQUIRED = {
    "deepseek": (
        "first_k_dense_replace hidden_size intermediate_size kv_lora_rank max_position_embeddings"
        " moe_intermediate_size n_group n_routed_experts norm_topk_prob num_attention_heads"
        " num_experts_per_tok num_hidden_layers qk_nope_head_dim qk_rope_head_dim rms_norm_eps"
        " rope_theta routed_scaling_factor topk_group v_head_dim vocab_size"
    ),
    "qwen": (
        "hidden_size max_position_embeddings moe_intermediate_size norm_topk_prob"
        " num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads"
        " rms_norm_eps rope_theta vocab_size"
    ),
    "mixtral": (
        "hidden_size intermediate_size max_position_embeddings num_attention_heads"
        " num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts"
        " rms_norm_eps rope_theta vocab_size"
    ),
}
CASES = [(family, field) for family, fields in REQUIRED.items() for field in fields.split()]


@pytest.mark.parametrize(("family", "field"), CASES)
def test_required_fields_are_checked(family: str, field: str) -> None:
    maker = MAKERS[family]
    without = maker()
    del without[field]
    with pytest.raises(CheckpointError, match=rf"^config\.json: {field} is missing$"):
        read(without)
    wrong_types: tuple[object, ...] = ("7", [7], {})
    for wrong_type in wrong_types:
        with pytest.raises(CheckpointError, match=rf"^config\.json: {field} is .*, must be "):
            read(maker(**{field: wrong_type}))
    for out_of_range in (-1, 1 << 60, 1e300):
        with pytest.raises(CheckpointError, match=rf"^config\.json: {field} is .*must be "):
            read(maker(**{field: out_of_range}))


BAD = [
    (
        "mixtral",
        {"architectures": ["GptNeoForCausalLM"]},
        "architectures names 'GptNeoFor.*Mixtral",
    ),
    ("mixtral", {"architectures": []}, "architectures is missing; known are DeepseekV3"),
    ("mixtral", {"architectures": "Mixtral"}, "architectures is 'Mixtral', must be a list"),
    ("mixtral", {"hidden_size": True}, "hidden_size is True, must be an integer"),
    ("mixtral", {"hidden_size": 4100}, r"num_attention_heads is 32, must divide hidden_size"),
    ("mixtral", {"head_dim": 33}, "head_dim is 33, must be even"),
    ("mixtral", {"num_key_value_heads": 5}, r"must divide num_attention_heads \(32\)"),
    ("mixtral", {"num_key_value_heads": 64}, r"must be between 1 and num_attention_heads \(32\)"),
    ("mixtral", {"num_experts_per_tok": 9}, r"9, must be between 1 and num_local_experts \(8\)"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096, and only null"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu' is supported"),
    ("mixtral", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be between 0 and 1"),
    ("mixtral", {"eos_token_id": 32000}, "eos_token_id holds 32000, must be between 0 and 31999"),
    ("mixtral", {"eos_token_id": "</s>"}, "eos_token_id is '</s>', must be an integer or a list"),
    ("mixtral", {"bos_token_id": -1}, "bos_token_id holds -1"),
    ("mixtral", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, must be true or false"),
    ("qwen", {"num_experts": None}, "num_local_experts is missing"),
    ("qwen", {"attention_bias": True}, "attention_bias is True, and only False is supported"),
    ("qwen", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen", {"mlp_only_layers": [4]}, "mlp_only_layers holds 4, must be between 0 and 3"),
    ("qwen", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    (
        "qwen",
        {"rope_scaling": {"type": "dynamic"}},
        r"rope_scaling\.type is 'dynamic', must be one",
    ),
    ("qwen", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
    ("qwen", {"rope_scaling": []}, r"rope_scaling is \[\], must be an object"),
    (
        "qwen",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2}},
        r"rope_parameters\.original_max_position_embeddings is missing",
    ),
    ("qwen", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("deepseek", {"num_experts_per_tok": 5}, r"topk_group \(2\) groups a token may use hold 4"),
    ("deepseek", {"n_group": 3}, r"n_group is 3, must divide n_routed_experts \(8\)"),
    ("deepseek", {"n_group": 8}, r"n_group is 8, must be between 1 and n_routed_experts / 2 \(4\)"),
    ("deepseek", {"topk_group": 5}, r"topk_group is 5, must be between 1 and n_group \(4\)"),
    ("deepseek", {"first_k_dense_replace": 4}, r"and num_hidden_layers \(3\)"),
    ("deepseek", {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, must be even"),
    ("deepseek", {"q_lora_rank": 0}, "q_lora_rank is 0"),
    ("deepseek", {"scoring_func": "softmax"}, "scoring_func is 'softmax', and only 'sigmoid'"),
    ("deepseek", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("deepseek", {"n_shared_experts": -1}, "n_shared_experts is -1"),
    (
        "deepseek",
        {"quantization_config": {"quant_method": "hqq"}},
        r"quantization_config\.quant_method is 'hqq', must be one of fp8, compressed-tensors,",
    ),
    (
        "deepseek",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"quantization_config\.weight_block_size is \[64, 64\], and only \[128, 128\]",
    ),
    (
        "deepseek",
        {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "fmt": "e5m2",
            }
        },
        r"quantization_config\.fmt is 'e5m2'",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), BAD)
def test_bad_values_are_named(family: str, changes: Config, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(MAKERS[family](**changes))
    assert str(caught.value).startswith("config.json: ")
