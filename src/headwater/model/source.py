"""Where the model code gets its tensors: by canonical name, wrapped for use."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headwater.model.linear import Matrix, Scratch
from headwater.model.norm import RmsNorm


class Weights(Protocol):
    """Tensors by canonical name; they must stay valid and unchanged while the model lives."""

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, as listed by ModelSpec.tensors()."""
        ...


class WeightSource:
    """The tensors below `prefix`, sharing one scratch."""

    def __init__(
        self, weights: Weights, scratch: Scratch, norm_eps: float, prefix: str = ""
    ) -> None:
        self._weights = weights
        self._scratch = scratch
        self._norm_eps = norm_eps
        self._prefix = prefix

    def below(self, name: str) -> WeightSource:
        """The tensors whose names go on with `name` and a dot."""
        return WeightSource(self._weights, self._scratch, self._norm_eps, f"{self._prefix}{name}.")

    def tensor(self, name: str) -> Tensor:
        """The tensor as it lies."""
        return self._weights.tensor(self._prefix + name)

    def matrix(self, name: str) -> Matrix:
        """The linear weight `name`, with its scale in FP8; leading dimensions stacked as rows."""
        return Matrix(self.tensor(name), self._scale(name), self._scratch)

    def matrices(self, name: str) -> list[Matrix]:
        """The linear weights stacked along the first dimension of `name`, one by one."""
        weight, scale = self.tensor(name), self._scale(name)
        return [
            Matrix(weight[i], None if scale is None else scale[i], self._scratch)
            for i in range(weight.shape[0])
        ]

    def norm(self, name: str) -> RmsNorm:
        """The normalisation with weight `name`."""
        return RmsNorm(self.tensor(name), self._norm_eps)

    def _scale(self, name: str) -> Tensor | None:
        is_fp8 = self.tensor(name).dtype == torch.float8_e4m3fn
        return self.tensor(f"{name}.scale") if is_fp8 else None
