"""Weights that stay on the device for decoding, and their products with a few tokens.

Owns the form they stay in: E4M3 with its scales, read as it is by a kernel of its own; everything
else becomes FP16 once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from headwater.gpu.dense import DenseMatrix, DenseWeights
from headwater.gpu.kernels.experts import FP8_BLOCK
from headwater.gpu.precision import ACTIVATED_SCALE, activated
from headwater.model.gate import choose_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.model.layer_spec import MoeFfnSpec
    from headwater.model.source import Weights

_SUFFIXES = ("", ".scale", ".zero")


class ResidentMatrix:
    """A linear weight [N, K], times `factor`, a power of two."""

    def __init__(self, tensors: dict[str, Tensor], name: str, factor: float = 1.0) -> None:
        values = tensors[name]
        self._fp8: tuple[Tensor, Tensor] | None = None
        if values.dtype == torch.float8_e4m3fn and values.is_cuda:
            self._fp8 = values, tensors[f"{name}.scale"] * factor
        else:
            dense = DenseWeights(tensors, 0.0).matrix(name)
            self._dense = dense if factor == 1 else DenseMatrix(dense.values * factor)

    @classmethod
    def joined(cls, matrices: Sequence[ResidentMatrix]) -> ResidentMatrix:
        """One matrix of the rows of several; E4M3 stays so where scale blocks line up."""
        parts = [matrix._fp8 for matrix in matrices if matrix._fp8 is not None]
        is_fp8 = len(parts) == len(matrices)
        if is_fp8 and all(values.shape[0] % FP8_BLOCK == 0 for values, _ in parts[:-1]):
            joined = torch.cat([values.view(torch.uint8) for values, _ in parts])
            scales = torch.cat([scale for _, scale in parts])
            return cls({"it": joined.view(torch.float8_e4m3fn), "it.scale": scales}, "it")
        return cls({"it": torch.cat([matrix.whole() for matrix in matrices])}, "it")

    def product(self, x: Tensor) -> Tensor:
        """x, FP16 [T, K], times the transposed matrix: FP32 [T, N]."""
        pieces = self.pieces(x)
        return pieces[0] if pieces.shape[0] == 1 else pieces.sum(dim=0)

    def pieces(self, x: Tensor) -> Tensor:
        """The same as FP32 [pieces, T, N], to be added up by whoever reads it."""
        if self._fp8 is None:
            return self._dense.product(x)[None]
        from headwater.gpu.kernels.few_rows import few_rows_pieces

        return few_rows_pieces(x, *self._fp8)

    def whole(self) -> Tensor:
        """The matrix in FP16 [N, K]."""
        if self._fp8 is None:
            return self._dense.values
        values, scale = self._fp8
        return DenseWeights({"it": values, "it.scale": scale}, 0.0).matrix("it").values


class ResidentWeights:
    """The weights below `prefix`, brought to `device` as they are asked for."""

    def __init__(self, weights: Weights, device: torch.device, eps: float, prefix: str) -> None:
        self._weights = weights
        self._device = device
        self._eps = eps
        self._prefix = prefix

    def below(self, name: str) -> ResidentWeights:
        """The weights whose names go on with `name` and a dot."""
        prefix = f"{self._prefix}{name}."
        return ResidentWeights(self._weights, self._device, self._eps, prefix)

    def floats(self, name: str) -> Tensor:
        """The tensor in FP32."""
        return self._weights.tensor(self._prefix + name).to(self._device).float()

    def matrix(self, name: str, factor: float = 1.0) -> ResidentMatrix:
        """The linear weight `name`, times `factor`."""
        names = [name + suffix for suffix in _SUFFIXES]
        return ResidentMatrix(
            {
                n: self._weights.tensor(self._prefix + n).to(self._device)
                for n in names
                if self._prefix + n in self._weights
            },
            name,
            factor,
        )

    def norm(self, name: str) -> Norm:
        """The normalisation with weight `name`."""
        return Norm(self.floats(name), self._eps)


class Norm:
    """x / rms(x) * weight over the last dimension, FP32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """FP32 [..., N] -> FP32 [..., N]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class ResidentGate:
    """A routed layer's gate: `weight` is FP32 [experts, hidden], `bias` FP32 [experts] where the
    kind of gate has one."""

    spec: MoeFfnSpec
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, spec: MoeFfnSpec, weights: ResidentWeights) -> ResidentGate:
        """The gate of the layer whose weights are given."""
        bias = weights.floats("gate.bias") if spec.has_bias else None
        return cls(spec, weights.floats("gate"), bias)

    def __call__(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        """FP32 [T, hidden] -> experts int64 [T, k], and their weights FP32 [T, k]."""
        return choose_experts(self.spec, torch.mm(normal, self.weight.t()), self.bias)


class GatedNetwork:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: ResidentWeights) -> None:
        self._gate, self._up = weights.matrix("gate"), weights.matrix("up")
        self._down = weights.matrix("down", 1 / ACTIVATED_SCALE)

    def pieces(self, x: Tensor) -> Tensor:
        """FP16 [T, hidden] -> FP32 [pieces, T, hidden], to be added up by whoever reads it."""
        return self._down.pieces(activated(self._gate.product(x), self._up.product(x)))
