"""Checkpoints of four bits a weight in every published order, by the plainest possible quantiser.

Owns what is written for the tests; shares no code with headwater.convert or the loader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class FourBit:
    """A form: its quantization_config, which modules it covers, and how it writes a weight.

    `write` takes FP32 [N, K] to the tensors of a module, by suffix, and the values that they mean.
    """

    config: dict[str, Any]
    covers: Callable[[str], bool]
    write: Callable[[Tensor], tuple[Tensors, Tensor]]


def save_four_bit(bf16_folder: Path, folder: Path, dequantized_folder: Path, form: FourBit) -> None:
    """Makes two checkpoints of one: quantised, and the same values in FP32."""
    quantized: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in load_file(bf16_folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = tensor.ndim == 2 and not any(
            part in name for part in ("embed_tokens", "lm_head", ".gate.weight")
        )
        if is_linear and form.covers(module):
            tensors, values = form.write(tensor.float())
            quantized |= {f"{module}{suffix}": part for suffix, part in tensors.items()}
            dequantized[name] = values
        else:
            quantized[name], dequantized[name] = tensor, tensor.float()
    config = json.loads((bf16_folder / "config.json").read_text())
    for to, content, extra in (
        (folder, quantized, {"quantization_config": form.config}),
        (dequantized_folder, dequantized, {}),
    ):
        to.mkdir()
        save_file(content, to / "model.safetensors", metadata={"format": "pt"})
        (to / "config.json").write_text(json.dumps(config | extra))


def _symmetric(weight: Tensor, scale_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15, int64 [N, K], and scales [N, K/g] of `scale_type`."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).to(scale_type)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.long().flatten(1), scale


def _asymmetric(weight: Tensor, scale_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points, 1 to 15 so that every convention can write them."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).to(scale_type)
    zeros = (-low / scale.float()).round().clamp(1, 15)
    codes = (groups / scale.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.long().flatten(1), scale, zeros.long()


def _values(codes: Tensor, scale: Tensor, zeros: Tensor | int) -> Tensor:
    offset = zeros if isinstance(zeros, int) else zeros[..., None]
    groups = codes.unflatten(1, (-1, GROUP)) - offset
    values: Tensor = (groups * scale.float()[..., None]).flatten(1)
    return values


def _words(nibbles: Tensor) -> Tensor:
    """int64 [..., 8] -> int32 [...]: nibble i at bits 4i to 4i + 3."""
    word = sum(nibbles[..., i] << (4 * i) for i in range(8))
    assert isinstance(word, Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def _along_columns(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[M, N] -> int32 [M, N/8]; nibble i is column order[i] of its eight."""
    return _words(codes.unflatten(1, (-1, 8))[..., list(order)]).contiguous()


def _along_rows(codes: Tensor) -> Tensor:
    """[M, N] -> int32 [ceil(M/8), N]."""
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[0] % 8))
    return _words(padded.unflatten(0, (-1, 8)).transpose(1, 2)).contiguous()


def _pack_symmetric(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale = _symmetric(weight, torch.bfloat16)
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": _along_columns(codes), "weight_scale": scale, "weight_shape": shape}
    return _dotted(tensors), _values(codes, scale, 8)


def _pack_asymmetric(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zeros = _asymmetric(weight, torch.float16)
    tensors = {
        "weight_packed": _along_columns(codes),
        "weight_scale": scale,
        "weight_zero_point": _along_rows(zeros),
        "weight_shape": torch.tensor(weight.shape),
    }
    return _dotted(tensors), _values(codes, scale, zeros)


def _awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zeros = _asymmetric(weight, torch.float16)
    tensors = {
        "qweight": _along_columns(codes.t(), _AWQ_COLUMNS),
        "qzeros": _along_columns(zeros.t(), _AWQ_COLUMNS),
        "scales": scale.t().contiguous(),
    }
    return _dotted(tensors), _values(codes, scale, zeros)


def _gptq(weight: Tensor, zero_offset: int) -> tuple[Tensors, Tensor]:
    codes, scale, zeros = _asymmetric(weight, torch.float16)
    tensors = {
        "qweight": _along_rows(codes.t()),
        "qzeros": _along_columns(zeros.t() - zero_offset),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return _dotted(tensors), _values(codes, scale, zeros)


def _mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / 2.0 ** exponent[..., None]
    nearest = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).flatten(1)
    values = (_E2M1[nearest] * scaled.sign() * 2.0 ** exponent[..., None]).flatten(1)
    tensors = {
        "weight_packed": (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8),
        "weight_scale": (exponent + 127).to(torch.uint8),
    }
    return _dotted(tensors), values


def _dotted(tensors: Tensors) -> Tensors:
    return {f".{name}": tensor for name, tensor in tensors.items()}


def _compressed_tensors(*, symmetric: bool, ignore: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


FORMS = {
    # As Kimi-K2-Thinking: nothing but the experts.
    "pack_experts": FourBit(
        _compressed_tensors(
            symmetric=True,
            ignore=[
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|down)_proj.*",
            ],
        ),
        lambda module: ".experts." in module,
        _pack_symmetric,
    ),
    "pack_asymmetric": FourBit(
        _compressed_tensors(symmetric=False, ignore=["lm_head", "re:.*mlp.gate$"]),
        lambda module: True,
        _pack_asymmetric,
    ),
    "awq": FourBit(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["shared_experts", "lm_head"],
        },
        lambda module: "shared_experts" not in module,
        _awq,
    ),
    "gptq": FourBit(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": False,
            "dynamic": {r"-:.*o_proj": {}},
        },
        lambda module: not module.endswith("o_proj"),
        lambda weight: _gptq(weight, 1),
    ),
    "gptq_v2": FourBit(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        },
        lambda module: True,
        lambda weight: _gptq(weight, 0),
    ),
    "mxfp4": FourBit(
        {
            "quant_method": "mxfp4",
            "group_size": GROUP,
            "modules_to_not_convert": ["self_attn", "lm_head"],
        },
        lambda module: "self_attn" not in module,
        _mxfp4,
    ),
}
