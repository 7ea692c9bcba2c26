"""Weights that stay on the device for decoding, and their products with a few tokens.

Owns the form they stay in: E4M3 with its scales, read as it is by a kernel of its own; everything
else becomes BF16 once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from headwater.gpu.dense import DenseWeights
from headwater.gpu.kernels.experts import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.model.source import Weights

_SUFFIXES = ("", ".scale", ".zero")


class ResidentMatrix:
    """A linear weight [N, K]."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self._values, self._scales = tensors[name], tensors.get(f"{name}.scale")
        self._is_fp8 = self._values.dtype == torch.float8_e4m3fn and self._values.is_cuda
        if not self._is_fp8:
            self._dense = DenseWeights(tensors, 0.0, is_exact=False).matrix(name)

    @classmethod
    def joined(cls, matrices: Sequence[ResidentMatrix]) -> ResidentMatrix:
        """One matrix of the rows of several; E4M3 stays so where scale blocks line up."""
        values = [matrix._values for matrix in matrices]
        scales = [matrix._scales for matrix in matrices]
        is_fp8 = all(matrix._is_fp8 for matrix in matrices)
        if is_fp8 and all(v.shape[0] % FP8_BLOCK == 0 for v in values[:-1]):
            found = [scale for scale in scales if scale is not None]
            bytes_of = torch.cat([v.view(torch.uint8) for v in values])
            return cls({"it": bytes_of.view(values[0].dtype), "it.scale": torch.cat(found)}, "it")
        return cls({"it": torch.cat([matrix.whole() for matrix in matrices])}, "it")

    def product(self, x: Tensor) -> Tensor:
        """x, BF16 [T, K], times the transposed matrix: FP32 [T, N]."""
        pieces = self.pieces(x)
        return pieces[0] if pieces.shape[0] == 1 else pieces.sum(dim=0)

    def pieces(self, x: Tensor) -> Tensor:
        """The same as FP32 [pieces, T, N], to be added up by whoever reads it."""
        if not self._is_fp8:
            return self._dense.product(x)[None]
        from headwater.gpu.kernels.few_rows import few_rows_pieces

        assert self._scales is not None
        return few_rows_pieces(x, self._values, self._scales)

    def whole(self) -> Tensor:
        """The matrix in BF16 [N, K]."""
        if not self._is_fp8:
            return self._dense.high
        tensors = {"it": self._values, "it.scale": self._scales}
        found = {name: t for name, t in tensors.items() if t is not None}
        return DenseWeights(found, 0.0, is_exact=False).matrix("it").high


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

    def matrix(self, name: str) -> ResidentMatrix:
        """The linear weight `name`."""
        names = [name + suffix for suffix in _SUFFIXES]
        return ResidentMatrix(
            {
                n: self._weights.tensor(self._prefix + n).to(self._device)
                for n in names
                if self._prefix + n in self._weights
            },
            name,
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


class GatedNetwork:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: ResidentWeights) -> None:
        self._gate, self._up, self._down = (weights.matrix(n) for n in ("gate", "up", "down"))

    def pieces(self, x: Tensor) -> Tensor:
        """BF16 [T, hidden] -> FP32 [pieces, T, hidden], to be added up by whoever reads it."""
        activated = functional.silu(self._gate.product(x)).mul_(self._up.product(x))
        return self._down.pieces(activated.bfloat16())
