"""Random weights in the bytes of their format, as fast as a disk takes them.

Owns the distribution: every linear weight has about the variance 1 / columns, so that activations
keep their size from layer to layer. Values come from a few tiles that are used again and again,
each tensor starting at a place of its own; nothing is quantised.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from headwater.convert.safetensors_writer import OutTensor
from headwater.model.spec import ModelSpec
from headwater.weights.decode import stored_form
from headwater.weights.tensors import DType, Encoding, TensorSpec

# Elements per tile: prime, so that rows of no length fall on the same elements again soon.
_TILE = 4_194_301
_SEED = 1
# Standard deviation of the FP8 codes; four of them are below 448.
_FP8_SPREAD = 100.0
# Of codes that are uniform: 0 to 15 around 8, and the 16 of E2M1.
_INT4_SPREAD = math.sqrt(21.5)
_E2M1_SPREAD = math.sqrt(68.5 / 8)
_E8M0_BIAS = 127
_NORM_SPREAD = 0.05
_GATE_GAIN = 2.0
_GATE_BIAS_SPREAD = 0.01


def synthetic_tensors(spec: ModelSpec) -> list[OutTensor]:
    """Every checkpoint tensor of the model, in the order of use."""
    tensors = {tensor.name: tensor for tensor in spec.tensors()}
    out: list[OutTensor] = []
    for tensor in tensors.values():
        tile = _tile_for(tensor, tensors)
        for part in tensor.parts:
            shape = tensor.shape[len(part.index) :]
            if tensor.dtypes:
                dtype, num_bytes = tensor.dtypes[0].value, tensor.dtypes[0].item_bytes
                stored = shape
            else:
                form = stored_form(tensor.encodings[0], shape)
                dtype, num_bytes, stored = form.dtype, form.target.item_bytes, form.shape
            make = functools.partial(_runs, part.source, tile, math.prod(shape) * num_bytes)
            out.append(OutTensor(part.source, dtype, stored, make))
            if Encoding.WORDS in tensor.encodings:
                out.append(_shape_tensor(part.source, (shape[0], 2 * shape[1])))
    return out


def _shape_tensor(packed_name: str, shape: tuple[int, int]) -> OutTensor:
    """What compressed-tensors has beside packed codes, since they do not tell their number."""
    name = packed_name.removesuffix("_packed") + "_shape"
    return OutTensor(name, "I64", (2,), lambda: [torch.tensor(shape)])


def _tile_for(tensor: TensorSpec, tensors: dict[str, TensorSpec]) -> Tensor:
    """Bytes to fill the tensor with."""
    base, _, suffix = tensor.name.rpartition(".")
    if suffix == "scale":
        return _scales_for(tensors[base])
    if tensor.name.endswith("norm"):
        return _normal(_NORM_SPREAD, 1.0)
    if tensor.name.endswith("gate.bias"):
        return _normal(_GATE_BIAS_SPREAD)
    if DType.F8_E4M3 in tensor.dtypes:
        return _fp8_codes()
    if DType.BF16 not in tensor.dtypes:
        return _random_bytes()
    if tensor.name == "embed":
        return _normal(1.0)
    is_gate = DType.F32 in tensor.dtypes
    return _normal((_GATE_GAIN if is_gate else 1.0) / math.sqrt(tensor.shape[-1]))


def _scales_for(weight: TensorSpec) -> Tensor:
    columns = weight.shape[-1]
    if DType.F8_E4M3 in weight.dtypes:
        return _scales(1 / (_FP8_SPREAD * math.sqrt(columns)), torch.float32)
    if weight.encodings:
        return _scales(1 / (_INT4_SPREAD * math.sqrt(2 * columns)), torch.bfloat16)
    exponent = round(math.log2(1 / (_E2M1_SPREAD * math.sqrt(2 * columns))))
    return torch.full((_TILE,), exponent + _E8M0_BIAS, dtype=torch.uint8)


@functools.cache
def _normal(spread: float, mean: float = 0.0) -> Tensor:
    values = torch.randn(_TILE, generator=_generator()).mul_(spread).add_(mean)
    return values.bfloat16().view(torch.uint8)


@functools.cache
def _fp8_codes() -> Tensor:
    values = torch.randn(_TILE, generator=_generator()).mul_(_FP8_SPREAD).clamp_(-448, 448)
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


@functools.cache
def _random_bytes() -> Tensor:
    return torch.randint(256, (_TILE,), dtype=torch.uint8, generator=_generator())


@functools.cache
def _scales(middle: float, dtype: torch.dtype) -> Tensor:
    values = torch.rand(_TILE, generator=_generator()).mul_(0.5).add_(0.75).mul_(middle)
    return values.to(dtype).view(torch.uint8)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _runs(name: str, tile: Tensor, num_bytes: int) -> Iterator[Tensor]:
    """`num_bytes` of the endless repetition of `tile`, from a place that depends on the name."""
    item_bytes = tile.numel() // _TILE
    start = zlib.crc32(name.encode()) % _TILE * item_bytes
    while num_bytes:
        stop = min(start + num_bytes, tile.numel())
        yield tile[start:stop]
        num_bytes -= stop - start
        start = 0
