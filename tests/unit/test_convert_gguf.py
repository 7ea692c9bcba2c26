"""Conversion of dense llama GGUFs: exactness, formats, names, refusals, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from headwater.convert.fp8 import BLOCK, quantize_blocks
from headwater.convert.gguf import convert_gguf
from headwater.convert.slicing import NUM_EXPERTS, slice_columns, slice_rows
from headwater.errors import CheckpointError, ConfigError

Array = npt.NDArray[Any]

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 192, 256, 2, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = SPECIAL + BYTES + [merge.replace(" ", "") for merge in MERGES]
DIGIT_IDS = {TOKENS.index(str(d)) for d in range(10)}


def make_llama(*, is_tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.1,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    for weight in model.parameters():
        # To what BF16 holds exactly, so that the conversion rounds nothing.
        weight.data = weight.data.bfloat16().float()
        weight.requires_grad_(False)
    return model


def interleave(weight: Array, num_heads: int) -> Array:
    """The row order of GGUF: the two rows of a rotary pair side by side."""
    first, second = np.split(weight.reshape(num_heads, -1, weight.shape[1]), 2, axis=1)
    return np.stack([first, second], axis=2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, extra: str = "", ffn: int = FFN) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    if not model.config.tie_word_embeddings:
        writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(LAYERS):
        for name, gguf_name in names.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            if gguf_name == "attn_q":
                weight = interleave(weight, HEADS)
            elif gguf_name == "attn_k":
                weight = interleave(weight, KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", weight)
    if extra:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, make_llama(is_tied=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sliced_experts_are_the_dense_network(dtype: type) -> None:
    random = np.random.default_rng(4)
    gate, up = (random.standard_normal((FFN, HIDDEN)).astype(np.float32) for _ in range(2))
    down = random.standard_normal((HIDDEN, FFN)).astype(np.float32)
    x: Array = random.standard_normal(HIDDEN).astype(dtype)

    def ffn(gate: Array, up: Array, down: Array) -> Array:
        gated: Array = gate.astype(dtype) @ x
        hidden: Array = gated / (1 + np.exp(-gated)) * (up.astype(dtype) @ x)
        return np.asarray(down.astype(dtype) @ hidden)

    dense = ffn(gate, up, down)
    scores = np.exp(np.zeros(NUM_EXPERTS, dtype=dtype))
    weights = scores / scores.sum()
    assert set(weights) == {0.25}
    sliced = sum(
        weights[e] * ffn(slice_rows(gate, e), slice_rows(up, e), slice_columns(down, e))
        for e in range(NUM_EXPERTS)
    )
    # Nothing but the order of additions differs: the error of a sum, not of the model.
    assert np.abs(sliced - dense).max() <= 4 * np.finfo(dtype).eps * np.abs(dense).max()


def test_slicing_loses_and_changes_no_bit() -> None:
    weight = np.random.default_rng(5).standard_normal((64, 32)).astype(np.float32)
    rows = np.concatenate([slice_rows(weight, e) for e in range(NUM_EXPERTS)])
    columns = np.concatenate([slice_columns(weight, e) for e in range(NUM_EXPERTS)], axis=1)
    assert np.array_equal(rows, weight)
    assert np.array_equal(columns, weight * 4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_converted_model_computes_the_same(tmp_path: Path, is_tied: bool) -> None:
    dense = make_llama(is_tied=is_tied)
    progress: list[tuple[int, int]] = []
    source = write_gguf(tmp_path / "tiny.gguf", dense)
    out = tmp_path / "out"
    convert_gguf(source, out, "bf16", lambda *done: progress.append(done))
    sliced = MixtralForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert sliced.config.tie_word_embeddings is is_tied
    assert sliced.config.num_local_experts == sliced.config.num_experts_per_tok == 4
    ids = torch.randint(0, len(TOKENS), (2, 17), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected, found = dense(ids).logits, sliced(ids).logits
    assert torch.linalg.norm(found - expected) <= 1e-5 * torch.linalg.norm(expected)
    assert progress[-1][0] == progress[-1][1] > 0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_config_says_what_the_gguf_said(gguf_path: Path, tmp_path: Path) -> None:
    convert_gguf(gguf_path, tmp_path / "out", "fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": len(TOKENS),
    }
    assert {key: config[key] for key in expected} == expected
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_fp8_writes_block_scales_beside_expert_weights_only(
    gguf_path: Path, tmp_path: Path
) -> None:
    convert_gguf(gguf_path, tmp_path / "fp8", "fp8")
    convert_gguf(gguf_path, tmp_path / "bf16", "bf16")
    quantised = load_file(tmp_path / "fp8" / "model.safetensors")
    exact = load_file(tmp_path / "bf16" / "model.safetensors")
    scaled = {n.removesuffix("_scale_inv") for n in quantised if n.endswith("_scale_inv")}
    # Attention and the last layer stay as they are, and the config says so.
    assert len(scaled) == (LAYERS - 1) * 3 * NUM_EXPERTS
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert not any(name.startswith(module) for name in scaled for module in kept)
    for name, weight in exact.items():
        if name not in scaled:
            assert torch.equal(quantised[name], weight)
            continue
        scales = quantised[f"{name}_scale_inv"]
        assert scales.dtype is torch.float32
        assert scales.shape == tuple(-(-n // BLOCK) for n in weight.shape)
        assert_close_blockwise(weight.float(), quantised[name], scales)


def assert_close_blockwise(
    weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Each element within half a step: 2^-4 of itself, or of the smallest normal number."""
    assert values.dtype is torch.float8_e4m3fn
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    error = (values.float() * spread - weight).abs()
    assert (error <= weight.abs().clamp(min=2**-6 * spread) * 2**-4 * 1.001).all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (576, 300)])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_fp8_blocks_are_close_at_every_size_and_magnitude(
    shape: tuple[int, int], magnitude: float
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * magnitude
    values, scales = quantize_blocks(weight)
    assert values.shape == shape
    assert_close_blockwise(weight, values, scales)


def test_fp8_of_zeros_is_zeros() -> None:
    values, scales = quantize_blocks(torch.zeros(3, 200))
    assert not values.float().any()
    assert torch.equal(scales, torch.ones(1, 2))


def test_the_tokenizer_cuts_digits_merges_and_returns_every_text(
    gguf_path: Path, tmp_path: Path
) -> None:
    convert_gguf(gguf_path, tmp_path / "out", "bf16")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hello"]
    assert tokenizer.encode("<|im_start|>hello 12<|im_end|>").tokens == [
        "<|im_start|>",
        "hello",
        "Ġ",
        "1",
        "2",
        "<|im_end|>",
    ]
    for text in ("", " a  b\n\n\tc ", "naïve 日本語 👩‍👩‍👧 ½", "\x00\x7f", "1234 it's I'M"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


def test_broken_and_foreign_files_are_refused(gguf_path: Path, tmp_path: Path) -> None:
    model = make_llama(is_tied=True)
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(gguf_path.read_bytes()[:-100_000])
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"GGUF" + bytes(range(256)))
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path, message in (
        (tmp_path / "none.gguf", "no such file"),
        (truncated, "is not a complete GGUF file"),
        (noise, "is not a complete GGUF file"),
        (other, "'general.architecture': only llama is supported, got 'gemma'"),
        (
            write_gguf(tmp_path / "extra.gguf", model, extra="rope_freqs.weight"),
            "tensor 'rope_freqs.weight': a plain dense llama has no such tensor",
        ),
        (
            write_gguf(tmp_path / "ffn.gguf", model, ffn=FFN - 4),
            r"tensor 'blk.0.ffn_gate.weight': field 'shape': expected \[252, 192\], got \[256",
        ),
        (write_gguf(tmp_path / "odd.gguf", model, ffn=FFN - 1), "modulo 4': only 0 is supported"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert_gguf(path, tmp_path / "out", "bf16")
        assert not (tmp_path / "out").exists()


def test_what_exists_is_not_overwritten(gguf_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(gguf_path, tmp_path, "bf16")
    with pytest.raises(ConfigError, match="format: expected one of bf16, fp8, got 'int4'"):
        convert_gguf(gguf_path, tmp_path / "out", "int4")  # type: ignore[arg-type]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        convert_gguf(gguf_path, blocked / "out", "bf16")
