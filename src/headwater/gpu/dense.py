"""The weights of a layer that every token meets, on the device: matrices in FP16, norms in FP32.

Owns how they become so: values times scales, made for one use and then dropped. FP16 has 11 bits of
a weight, which is all of BF16 and E4M3, and of their products with scales all but 2^-11; what is
smaller than 2^-14 loses up to 2^-25.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headwater.gpu.precision import ACTIVATED_SCALE, activated
from headwater.model.expand import rows_of

# FP32 elements while a weight is expanded: whole blocks of rows of every format.
_EXPAND_ELEMENTS = 1 << 24
_ROW_STEP = 128


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A linear weight in FP16 [N, K]."""

    values: Tensor

    def rows(self, first: int, stop: int) -> DenseMatrix:
        """Rows [first, stop)."""
        return DenseMatrix(self.values[first:stop])

    def product(self, x: Tensor) -> Tensor:
        """x, FP16 [T, K], times the transposed matrix: FP32 [T, N]."""
        if x.is_cuda:
            return torch.mm(x, self.values.t(), out_dtype=torch.float32)
        return torch.mm(x.float(), self.values.float().t())


class DenseWeights:
    """The tensors of one layer by their name below it; see ModelSpec.tensors."""

    def __init__(self, tensors: dict[str, Tensor], norm_eps: float) -> None:
        self._tensors = tensors
        self._norm_eps = norm_eps

    def floats(self, name: str) -> Tensor:
        """The tensor in FP32."""
        return self._tensors[name].float()

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x, FP32 [..., N], over its root mean square, times the weight: FP32."""
        weight = self.floats(name)
        return functional.rms_norm(x, weight.shape, weight, self._norm_eps)

    def matrix(self, name: str) -> DenseMatrix:
        """The linear weight [N, K]."""
        weight, scale = self._tensors[name], self._tensors.get(f"{name}.scale")
        if scale is None:
            return DenseMatrix(weight.half())
        source = rows_of(weight, scale, self._tensors.get(f"{name}.zero"))
        shape = (source.count, source.columns)
        values = torch.empty(shape, dtype=torch.float16, device=weight.device)
        step = max(_ROW_STEP, _EXPAND_ELEMENTS // source.columns // _ROW_STEP * _ROW_STEP)
        for start in range(0, source.count, step):
            rows = values[start : start + step]
            floats = torch.empty(rows.shape, device=weight.device)
            source.expand(start, floats)
            rows.copy_(floats)
        return DenseMatrix(values)


def add_gated_network(
    target: Tensor, x: Tensor, weights: DenseWeights, name: str, slice_tokens: int
) -> None:
    """target += down(silu(gate(x)) * up(x)); `target` FP32 and `x` FP16, both [T, hidden]."""
    gate, up, down = (weights.matrix(f"{name}.{part}") for part in ("gate", "up", "down"))
    for first in range(0, x.shape[0], slice_tokens):
        rows = x[first : first + slice_tokens]
        inner = activated(gate.product(rows), up.product(rows))
        target[first : first + slice_tokens].add_(down.product(inner), alpha=1 / ACTIVATED_SCALE)
