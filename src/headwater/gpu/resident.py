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

if TYPE_CHECKING:
    from headwater.model.source import Weights

_SUFFIXES = ("", ".scale", ".zero")


class ResidentMatrix:
    """A linear weight [N, K]."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self._values, self._scales = tensors[name], tensors.get(f"{name}.scale")
        self._is_fp8 = self._values.dtype == torch.float8_e4m3fn and self._values.is_cuda
        if not self._is_fp8:
            self._dense = DenseWeights(tensors, 0.0, is_exact=False).matrix(name)

    def product(self, x: Tensor) -> Tensor:
        """x, BF16 [T, K], times the transposed matrix: FP32 [T, N]."""
        if not self._is_fp8:
            return self._dense.product(x)
        from headwater.gpu.kernels.few_rows import few_rows_product

        assert self._scales is not None
        return few_rows_product(x, self._values, self._scales)

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
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """FP32 [..., N] -> FP32 [..., N]."""
        return functional.rms_norm(x, self._weight.shape, self._weight, self._eps)


class GatedNetwork:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: ResidentWeights) -> None:
        self._gate, self._up, self._down = (weights.matrix(n) for n in ("gate", "up", "down"))

    def __call__(self, x: Tensor) -> Tensor:
        """BF16 [T, hidden] -> FP32 [T, hidden]."""
        activated = functional.silu(self._gate.product(x)).mul_(self._up.product(x))
        return self._down.product(activated.bfloat16())
