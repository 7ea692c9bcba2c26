"""Reads a checkpoint's linear weights as FP32 rows, whatever their format, in bounded memory.

Owns the pairing of a weight with its scales and zero points; the arithmetic is headwater.model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwater.errors import CheckpointError
from headwater.model.expand import rows_of
from headwater.model.layer_spec import FP8_BLOCK
from headwater.model.spec import ModelSpec
from headwater.weights.checkpoint import Checkpoint, CheckpointTensor, read_checkpoint
from headwater.weights.conversion import decoded_chunks
from headwater.weights.plan import Conversion, whole_conversions
from headwater.weights.tensors import DType, TensorSpec

# FP32 elements expanded at a time: 4 MiB, so that what is done with them stays in the caches.
_RUN_ELEMENTS = 1 << 20
_BESIDE = (".scale", ".zero")
_TORCH_TYPES = {
    DType.BF16: torch.bfloat16,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F32: torch.float32,
    DType.U8: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class LinearModule:
    """One linear weight of a checkpoint.

    `path` is its module's, `name` the canonical tensor it belongs to; `shape` is [rows, columns].
    """

    path: str
    name: str
    shape: tuple[int, int]
    weight: Conversion
    scale: Conversion | None
    zeros: Conversion | None

    @property
    def is_expert(self) -> bool:
        """Whether it is part of a routed expert."""
        return ".experts." in self.name

    def rows(self) -> Iterator[Tensor]:
        """Runs of FP32 rows [n, columns], each but the last a multiple of 128 rows.

        Raises CheckpointError when a scale is not finite, or the file cannot be read.
        """
        scale, zeros = (None if c is None else _whole(c) for c in (self.scale, self.zeros))
        if scale is not None:
            self._check(scale)
        step = max(FP8_BLOCK, _RUN_ELEMENTS // self.shape[1] // FP8_BLOCK * FP8_BLOCK)
        for first, codes in decoded_chunks(self.weight, step):
            stop = first + codes.shape[0]
            values = _as_tensor(codes, self.weight.dtype)
            source = rows_of(values, self._part(scale, first, stop), self._part(zeros, first, stop))
            out = torch.empty(codes.shape[0], self.shape[1])
            source.expand(0, out)
            yield out

    def _part(self, beside: Tensor | None, first: int, stop: int) -> Tensor | None:
        if beside is None:
            return None
        if self.weight.dtype is DType.F8_E4M3:
            return beside[first // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        return beside[first:stop]

    def _check(self, scale: Tensor) -> None:
        is_good = scale != 255 if scale.dtype == torch.uint8 else scale.isfinite()
        if self.scale is not None and not bool(is_good.all()):
            tensor = self.scale.tensor
            raise CheckpointError(
                f"{tensor.file}: tensor '{tensor.name}': holds a scale that is not finite; "
                "fetch the file again"
            )


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint: its linear weights, in the order of use, and the tensors kept as they are."""

    spec: ModelSpec
    checkpoint: Checkpoint
    linears: tuple[LinearModule, ...]
    others: tuple[CheckpointTensor, ...]
    left_out: tuple[str, ...]


def read_source(folder: Path) -> Source:
    """Reads config and headers of `folder`. Raises CheckpointError."""
    checkpoint = read_checkpoint(folder)
    spec = ModelSpec.from_json(checkpoint.config_json, str(folder / "config.json"))
    tensors = {tensor.name: tensor for tensor in spec.tensors()}
    linears: list[LinearModule] = []
    others: list[CheckpointTensor] = []
    used: set[str] = set()
    for tensor in tensors.values():
        if tensor.name.endswith(_BESIDE):
            continue
        if is_linear(tensor):
            linears += _modules(tensor, tensors, checkpoint)
        else:
            others += [conversion.tensor for conversion in whole_conversions(tensor, checkpoint)]
    for module in linears:
        used |= {c.tensor.name for c in (module.weight, module.scale, module.zeros) if c}
        used.add(f"{module.path}.weight_shape")
    used |= {tensor.name for tensor in others}
    left_out = tuple(name for name in checkpoint.tensors if name not in used)
    return Source(spec, checkpoint, tuple(linears), tuple(others), left_out)


def is_linear(tensor: TensorSpec) -> bool:
    """Whether it is a linear weight, in any format, as against a norm, a table or a gate."""
    # Of a layer's tensors, the linear weights are those that are never published in FP32.
    return tensor.name.startswith("layers.") and DType.F32 not in tensor.dtypes


def _modules(
    tensor: TensorSpec, tensors: dict[str, TensorSpec], checkpoint: Checkpoint
) -> Iterator[LinearModule]:
    weights = whole_conversions(tensor, checkpoint)
    scales, zeros = (
        whole_conversions(tensors[tensor.name + suffix], checkpoint)
        if tensor.name + suffix in tensors
        else (None,) * len(weights)
        for suffix in _BESIDE
    )
    for weight, scale, zero in zip(weights, scales, zeros, strict=True):
        rows, columns = weight.shape
        per_element = 2 if weight.dtype is DType.U8 else 1
        path = weight.tensor.name.rpartition(".")[0]
        yield LinearModule(path, tensor.name, (rows, columns * per_element), weight, scale, zero)


def _whole(conversion: Conversion) -> Tensor:
    runs = [_as_tensor(run, conversion.dtype) for _, run in decoded_chunks(conversion)]
    return torch.cat(runs) if len(runs) > 1 else runs[0]


def _as_tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], dtype: DType) -> Tensor:
    return torch.from_numpy(values).view(_TORCH_TYPES[dtype])
