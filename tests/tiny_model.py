"""A tiny random Mixtral checkpoint with a byte-level tokenizer: seeded, made in milliseconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 4, 2, 16
EXPERTS, TOP_K, INTERMEDIATE = 4, 2, 96
SPECIAL_TOKENS = ("<|end|>", "<|turn|>")
VOCAB = 256 + len(SPECIAL_TOKENS)
CONTEXT = 512

CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, seed: int = 0, context: int = CONTEXT) -> Path:
    """Writes config, weights and tokenizer into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(context)))
    save_file(_weights(seed), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"})
    )
    return folder


def _config(context: int) -> dict[str, object]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": VOCAB,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
    }


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        spread = gain / float(columns) ** 0.5
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) * spread
        return values.to(torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 8.0),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 4.0),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        attention = f"{layer}.self_attn"
        weights[f"{attention}.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        weights[f"{attention}.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{attention}.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{attention}.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        moe = f"{layer}.block_sparse_moe"
        weights[f"{moe}.gate.weight"] = matrix(EXPERTS, HIDDEN, 2.0)
        for e in range(EXPERTS):
            weights[f"{moe}.experts.{e}.w1.weight"] = matrix(INTERMEDIATE, HIDDEN, 2.0)
            weights[f"{moe}.experts.{e}.w3.weight"] = matrix(INTERMEDIATE, HIDDEN, 2.0)
            weights[f"{moe}.experts.{e}.w2.weight"] = matrix(HIDDEN, INTERMEDIATE, 2.0)
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer
