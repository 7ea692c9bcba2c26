"""Tiny random checkpoints saved by transformers, their FP8 versions, and reference logits.

The reference is transformers in float32 on exactly the values that the checkpoint holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 320
PROMPT_TOKENS = 32
_BLOCK = 128
_E4M3_MAX = 448.0
_NUM_CANDIDATES = 768
# Our activations differ from the reference's by about 0.5 %; see stable_prompts.
_GATE_NOISE = 0.015
_NUM_NOISY_RUNS = 8

_DEEPSEEK: dict[str, object] = {
    "model_type": "deepseek_v3",
    "hidden_size": 192,
    "intermediate_size": 200,
    "moe_intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 136,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
}

# The sizes are such that FP8 blocks are ragged in every place.
MODELS: dict[str, dict[str, object]] = {
    # Four groups, YaRN with unequal mscales, compressed queries, a dense first layer.
    "deepseek_v3": _DEEPSEEK
    | {
        "q_lora_rank": 72,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    # One group, plain queries and rope, two shared experts, weights that do not sum to one.
    "deepseek_v3_plain": _DEEPSEEK
    | {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
    },
    # Heads wider than the hidden size, one dense layer among the routed ones, YaRN.
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 160,
        "intermediate_size": 264,
        "moe_intermediate_size": 136,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    # Tied embeddings and stretched positions.
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 144,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
}

# Models whose sizes are multiples of 32, as groups of four-bit codes must have.
FOUR_BIT_MODELS: dict[str, dict[str, object]] = {
    "deepseek_v3": MODELS["deepseek_v3"]
    | {
        "intermediate_size": 224,
        "moe_intermediate_size": 128,
        "kv_lora_rank": 128,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "qwen3_moe": MODELS["qwen3_moe"]
    | {"intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4},
}


def save_bf16(settings: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Saves a model whose gates and attention have something to decide."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**settings, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
            elif tensor.ndim == 1:
                tensor.normal_(mean=1.0, std=0.2)
            elif "embed_tokens" in name:
                tensor.normal_()
            else:
                tensor.normal_(std=1.0 / math.sqrt(tensor.shape[-1]))
    model.save_pretrained(folder)


def save_fp8(bf16_folder: Path, fp8_folder: Path, dequantized_folder: Path) -> None:
    """Makes two checkpoints of one: FP8 as published ones are, and the same values in float32."""
    tensors = load_file(bf16_folder / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not any(
            part in name for part in ("embed_tokens", "lm_head", ".gate.weight")
        ):
            weight, scale = quantize(tensor)
            quantized[name], quantized[f"{name}_scale_inv"] = weight, scale
            dequantized[name] = dequantize(weight, scale)
        else:
            quantized[name], dequantized[name] = tensor, tensor.float()
    config = json.loads((bf16_folder / "config.json").read_text())
    for folder, content in ((fp8_folder, quantized), (dequantized_folder, dequantized)):
        folder.mkdir()
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
    (fp8_folder / "config.json").write_text(json.dumps(config))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> FP8 [N, K] and FP32 scales [ceil(N/128), ceil(K/128)], by the blocks' maxima."""
    rows, columns = (-(-size // _BLOCK) for size in weight.shape)
    scale = torch.empty(rows, columns)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            block = (slice(r * _BLOCK, (r + 1) * _BLOCK), slice(c * _BLOCK, (c + 1) * _BLOCK))
            values = weight[block].float()
            scale[r, c] = values.abs().max() / _E4M3_MAX
            quantized[block] = (values / scale[r, c]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """The FP32 values of a quantised matrix."""
    expanded = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return weight.float() * expanded[: weight.shape[0], : weight.shape[1]]


def load_reference(folder: Path) -> PreTrainedModel:
    """The checkpoint in transformers, float32, with its plainest attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """[sequences, T] -> FP32 [sequences, T, vocabulary]."""
    with torch.inference_mode():
        logits: Tensor = model(token_ids, use_cache=False).logits
    return logits


def stable_prompts(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    """Random prompts, int64 [count, T], in which no gate has to decide a near tie.

    Which of two equally good experts a token goes to is a matter of rounding; where that differs,
    logits differ, and rightly so. Such prompts are left out: those for which slightly noisy
    inputs change any choice of any gate.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(VOCAB_SIZE, (_NUM_CANDIDATES, PROMPT_TOKENS), generator=generator)
    with _gate_choices(model, noise=0.0, generator=generator) as choices:
        reference_logits(model, prompts)
        exact = [gate.view(_NUM_CANDIDATES, -1) for gate in choices]
    for _ in range(_NUM_NOISY_RUNS):
        with _gate_choices(model, noise=_GATE_NOISE, generator=generator) as choices:
            reference_logits(model, prompts)
        is_stable = torch.ones(len(prompts), dtype=torch.bool)
        for ours, theirs in zip(exact, choices, strict=True):
            is_stable &= (ours == theirs.view(len(prompts), -1)).all(dim=1)
        prompts, exact = prompts[is_stable], [gate[is_stable] for gate in exact]
        assert len(prompts) >= count, f"only {len(prompts)} prompts are stable"
    return prompts[:count]


@contextmanager
def _gate_choices(
    model: PreTrainedModel, *, noise: float, generator: torch.Generator
) -> Iterator[list[Tensor]]:
    """Collects the experts that each gate chooses, sorted, [sequences * T, k] a gate."""
    choices: list[Tensor] = []

    def disturb(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        factor = torch.randn(inputs[0].shape, generator=generator) * noise + 1
        return (inputs[0] * factor,)

    def collect(
        module: torch.nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        choices.append(output[2].sort(dim=-1).values)

    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_pre_hook(disturb) for gate in gates]
    hooks += [gate.register_forward_hook(collect) for gate in gates]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()
