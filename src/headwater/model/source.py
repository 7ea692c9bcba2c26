"""Where the model code gets its tensors: by canonical name, wrapped for use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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

    def __contains__(self, name: str) -> bool: ...


_Parts = tuple[Tensor, Tensor | None, Tensor | None]


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
        """The linear weight `name` in its format; leading dimensions are stacked as rows."""
        return self._matrix(self._parts(name))

    def matrices(self, name: str, num_dimensions: int = 1) -> list[Matrix]:
        """The linear weights stacked along the leading dimensions of `name`, one by one."""
        members = (_members(part, num_dimensions) for part in self._parts(name))
        return [self._matrix(parts) for parts in zip(*members, strict=False)]

    def norm(self, name: str) -> RmsNorm:
        """The normalisation with weight `name`."""
        return RmsNorm(self.tensor(name), self._norm_eps)

    def _matrix(self, parts: tuple[Tensor | None, ...]) -> Matrix:
        weight, scale, zeros = parts
        assert weight is not None
        return Matrix(weight, scale, self._scratch, zeros)

    def _parts(self, name: str) -> _Parts:
        """Values, scales and zero points of `name`, as far as its format has them."""
        weight = self.tensor(name)
        is_packed = weight.dtype == torch.uint8
        scale = None
        if is_packed or weight.dtype == torch.float8_e4m3fn:
            scale = self.tensor(f"{name}.scale")
        has_zeros = is_packed and f"{self._prefix}{name}.zero" in self._weights
        return weight, scale, self.tensor(f"{name}.zero") if has_zeros else None


def _members(stack: Tensor | None, num_dimensions: int) -> Iterable[Tensor | None]:
    """The members of a stack; nothing, again and again, where there is no stack."""
    if stack is None:
        return itertools.repeat(None)
    return stack.flatten(0, num_dimensions - 1).unbind()
