"""Converts a dense llama GGUF into a Mixtral checkpoint that computes the same.

Owns the names, formats and config of what is written: config.json, model.safetensors and the
tokenizer's files (see gguf_tokenizer.py). Slicing is explained in slicing.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from headwater.convert.gguf_reader import FloatArray, GgufFile
from headwater.convert.gguf_tokenizer import write_tokenizer
from headwater.convert.linear_formats import Error, LinearTarget
from headwater.convert.new_folder import new_folder
from headwater.convert.safetensors_writer import OutTensor, ProgressFunction, write_safetensors
from headwater.convert.slicing import NUM_EXPERTS, slice_columns, slice_rows
from headwater.errors import CheckpointError, ConfigError

Format = Literal["bf16", "fp8"]

# A change of what is written needs a new headwater.convert.default_model.CONVERSION_VERSION.

_BF16 = LinearTarget("bf16")


@dataclass(frozen=True, slots=True)
class _Dimensions:
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool


def convert_gguf(
    gguf_path: Path, out_dir: Path, fmt: Format, on_progress: ProgressFunction | None = None
) -> None:
    """Writes the checkpoint folder `out_dir`, which must not exist; it appears when complete.

    "bf16" rounds all weights to BF16; "fp8" writes the linear ones as e4m3 with a float32
    `weight_scale_inv` per 128x128 block. Norms, embeddings and gates stay BF16.

    Raises CheckpointError when the GGUF is damaged or of another kind than dense llama, ConfigError
    for an unknown format or a folder that cannot be written.
    """
    if fmt not in get_args(Format):
        raise ConfigError(f"format: expected one of {', '.join(get_args(Format))}, got {fmt!r}")
    source = GgufFile(gguf_path)
    dims = _read_dimensions(source)
    tensors = list(_out_tensors(source, dims, fmt))
    with new_folder(out_dir, sum(tensor.num_bytes for tensor in tensors)) as building:
        write_safetensors(building / "model.safetensors", tensors, on_progress)
        config = json.dumps(_config(source, dims, fmt), indent=2) + "\n"
        (building / "config.json").write_text(config)
        write_tokenizer(source, building)


def _read_dimensions(source: GgufFile) -> _Dimensions:
    hidden = source.get("llama.embedding_length", int)
    num_heads = source.get("llama.attention.head_count", int)
    dims = _Dimensions(
        num_layers=source.get("llama.block_count", int),
        hidden=hidden,
        ffn=source.get("llama.feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=source.get("llama.attention.head_count_kv", int, num_heads),
        head_dim=source.get("llama.attention.key_length", int, hidden // num_heads),
        vocab_size=source.shape("token_embd.weight")[0],
        is_tied="output.weight" not in source.tensor_names,
    )
    unsupported = (
        ("llama.expert_count", source.get("llama.expert_count", int, 0), 0),
        ("llama.rope.scaling.type", source.get("llama.rope.scaling.type", str, "none"), "none"),
        ("llama.rope.dimension_count", _rotary_dim(source, dims), dims.head_dim),
        ("llama.feed_forward_length modulo 4", dims.ffn % NUM_EXPERTS, 0),
    )
    for field, found, expected in unsupported:
        if found != expected:
            raise CheckpointError(
                f"{source.path}: field '{field}': only {expected} is supported, got {found}"
            )
    unknown = source.tensor_names - _known_names(dims)
    if unknown:
        raise CheckpointError(
            f"{source.path}: tensor '{min(unknown)}': a plain dense llama has no such tensor; "
            "this variant is not supported"
        )
    return dims


def _rotary_dim(source: GgufFile, dims: _Dimensions) -> int:
    return source.get("llama.rope.dimension_count", int, dims.head_dim)


def _known_names(dims: _Dimensions) -> set[str]:
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
    parts += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    names = {f"blk.{layer}.{part}.weight" for layer in range(dims.num_layers) for part in parts}
    return names | {"token_embd.weight", "output_norm.weight", "output.weight"}


def _out_tensors(source: GgufFile, dims: _Dimensions, fmt: Format) -> Iterator[OutTensor]:
    def plain(name: str, origin: str, shape: tuple[int, ...]) -> OutTensor:
        _require_shape(source, origin, shape)
        return OutTensor(name, "BF16", shape, lambda: [_bf16(source.load(origin))])

    # The three weights of one layer's FFN stay dequantised while experts are cut from them.
    load_ffn = functools.lru_cache(maxsize=3)(source.load)
    yield plain("model.embed_tokens.weight", "token_embd.weight", (dims.vocab_size, dims.hidden))
    for layer in range(dims.num_layers):
        to, of = f"model.layers.{layer}", f"blk.{layer}"
        is_fp8 = fmt == "fp8" and to not in _kept_in_bf16(dims)
        expert_target = LinearTarget("fp8") if is_fp8 else _BF16
        yield plain(f"{to}.input_layernorm.weight", f"{of}.attn_norm.weight", (dims.hidden,))
        for name, shape, load in _attention_weights(source, dims, of):
            yield from _linear(_BF16, f"{to}.self_attn.{name}", shape, load)
        yield plain(
            f"{to}.post_attention_layernorm.weight", f"{of}.ffn_norm.weight", (dims.hidden,)
        )
        moe = f"{to}.block_sparse_moe"
        gate_shape = (NUM_EXPERTS, dims.hidden)
        yield OutTensor(
            f"{moe}.gate.weight",
            "BF16",
            gate_shape,
            functools.partial(_zeros, gate_shape),
        )
        for name, shape, load in _expert_weights(source, dims, of, load_ffn):
            yield from _linear(expert_target, f"{moe}.experts.{name}", shape, load)
    yield plain("model.norm.weight", "output_norm.weight", (dims.hidden,))
    if not dims.is_tied:
        yield plain("lm_head.weight", "output.weight", (dims.vocab_size, dims.hidden))


def _kept_in_bf16(dims: _Dimensions) -> tuple[str, ...]:
    """Modules that an FP8 checkpoint leaves in BF16.

    A small model feels FP8 more than a large one: with attention and the last layer in FP8 too, the
    default model's most likely token agrees in 92 % of positions, without them in 97 %.
    """
    attention = (f"model.layers.{layer}.self_attn" for layer in range(dims.num_layers))
    return (*attention, f"model.layers.{dims.num_layers - 1}")


LinearWeight = tuple[str, tuple[int, int], Callable[[], FloatArray]]


def _attention_weights(source: GgufFile, dims: _Dimensions, of: str) -> Iterator[LinearWeight]:
    q_rows, kv_rows = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    for name, origin, shape, num_rotary_heads in (
        ("q_proj", f"{of}.attn_q.weight", (q_rows, dims.hidden), dims.num_heads),
        ("k_proj", f"{of}.attn_k.weight", (kv_rows, dims.hidden), dims.num_kv_heads),
        ("v_proj", f"{of}.attn_v.weight", (kv_rows, dims.hidden), 0),
        ("o_proj", f"{of}.attn_output.weight", (dims.hidden, q_rows), 0),
    ):
        _require_shape(source, origin, shape)
        if num_rotary_heads:
            yield name, shape, functools.partial(source.load_rotary, origin, num_rotary_heads)
        else:
            yield name, shape, functools.partial(source.load, origin)


def _expert_weights(
    source: GgufFile, dims: _Dimensions, of: str, load: Callable[[str], FloatArray]
) -> Iterator[LinearWeight]:
    gate, down, up = (f"{of}.ffn_{part}.weight" for part in ("gate", "down", "up"))
    width = dims.ffn // NUM_EXPERTS

    def sliced(
        origin: str, expert: int, cut: Callable[[FloatArray, int], FloatArray]
    ) -> Callable[[], FloatArray]:
        return lambda: cut(load(origin), expert)

    for origin in (gate, up):
        _require_shape(source, origin, (dims.ffn, dims.hidden))
    _require_shape(source, down, (dims.hidden, dims.ffn))
    for e in range(NUM_EXPERTS):
        yield f"{e}.w1", (width, dims.hidden), sliced(gate, e, slice_rows)
        yield f"{e}.w2", (dims.hidden, width), sliced(down, e, slice_columns)
        yield f"{e}.w3", (width, dims.hidden), sliced(up, e, slice_rows)


def _linear(
    target: LinearTarget, name: str, shape: tuple[int, int], load: Callable[[], FloatArray]
) -> list[OutTensor]:
    def rows() -> Iterator[torch.Tensor]:
        yield torch.from_numpy(np.ascontiguousarray(load()))

    return target.tensors(name, shape, rows, Error())


def _zeros(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16)]


def _bf16(values: FloatArray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _require_shape(source: GgufFile, name: str, expected: tuple[int, ...]) -> None:
    if source.shape(name) != expected:
        raise CheckpointError(
            f"{source.path}: tensor '{name}': field 'shape': expected {list(expected)}, "
            f"got {list(source.shape(name))}"
        )


def _config(source: GgufFile, dims: _Dimensions, fmt: Format) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn // NUM_EXPERTS,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "hidden_act": "silu",
        "max_position_embeddings": source.get("llama.context_length", int),
        "rms_norm_eps": _short(source.get("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short(source.get("llama.rope.freq_base", float, 10000.0)),
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": dims.is_tied,
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id", int),
        "torch_dtype": "bfloat16",
    }
    if fmt == "fp8":
        config["quantization_config"] = LinearTarget("fp8").config(
            ["lm_head", *_kept_in_bf16(dims)]
        )
    return config


def _short(value: float) -> float:
    """The decimal number that was meant by a float32, which is how GGUF keeps it."""
    return float(f"{value:.7g}")
