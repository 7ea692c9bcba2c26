"""The weights of a layer that every token meets, on the device: matrices in BF16, norms in FP32.

Owns how they become so: values times scales, made for one use and then dropped. A product in BF16
has 8 bits of a weight; where that is not all of it (E4M3 times a scale, 4-bit codes), `is_exact`
adds a second BF16 matrix with the next 8 bits, which leaves a relative error of 2^-17.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headwater.gpu.precision import rounded
from headwater.model.expand import rows_of

# FP32 elements while a weight is expanded: whole blocks of rows of every format.
_EXPAND_ELEMENTS = 1 << 24
_ROW_STEP = 128


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A linear weight [N, K] as one BF16 matrix, or as the sum of two."""

    high: Tensor
    low: Tensor | None

    def rows(self, first: int, stop: int) -> DenseMatrix:
        """Rows [first, stop)."""
        low = None if self.low is None else self.low[first:stop]
        return DenseMatrix(self.high[first:stop], low)

    def product(self, x: Tensor) -> Tensor:
        """x, BF16 [T, K], times the transposed matrix: FP32 [T, N]."""
        out = _product(x, self.high)
        return out if self.low is None else out.add_(_product(x, self.low))


class DenseWeights:
    """The tensors of one layer by their name below it; see ModelSpec.tensors."""

    def __init__(self, tensors: dict[str, Tensor], norm_eps: float, *, is_exact: bool) -> None:
        self._tensors = tensors
        self._norm_eps = norm_eps
        self._is_exact = is_exact

    def floats(self, name: str) -> Tensor:
        """The tensor in FP32."""
        return self._tensors[name].float()

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x, FP32 [..., N], over its root mean square, times the weight: FP32."""
        weight = self.floats(name)
        return functional.rms_norm(x, weight.shape, weight, self._norm_eps)

    def matrix(self, name: str) -> DenseMatrix:
        """The linear weight [N, K]."""
        weight = self._tensors[name]
        if weight.dtype == torch.bfloat16:
            return DenseMatrix(weight, None)
        scale = self._tensors.get(f"{name}.scale")
        source = rows_of(weight, scale, self._tensors.get(f"{name}.zero"))
        # E2M1 times a power of two has no more bits than BF16.
        is_whole = scale is not None and scale.dtype == torch.uint8
        shape = (source.count, source.columns)
        high = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
        low = torch.empty_like(high) if self._is_exact and not is_whole else None
        step = max(_ROW_STEP, _EXPAND_ELEMENTS // source.columns // _ROW_STEP * _ROW_STEP)
        for start in range(0, source.count, step):
            rows = slice(start, start + step)
            floats = torch.empty(high[rows].shape, device=weight.device)
            source.expand(start, floats)
            high[rows] = floats
            if low is not None:
                low[rows] = floats.sub_(high[rows])
        return DenseMatrix(high, low)


def add_gated_network(
    target: Tensor, x: Tensor, weights: DenseWeights, name: str, slice_tokens: int
) -> None:
    """target += down(silu(gate(x)) * up(x)); `target` FP32 and `x` BF16, both [T, hidden]."""
    gate, up, down = (weights.matrix(f"{name}.{part}") for part in ("gate", "up", "down"))
    for first in range(0, x.shape[0], slice_tokens):
        rows = x[first : first + slice_tokens]
        activated = rounded(functional.silu(gate.product(rows)).mul_(up.product(rows)))
        target[first : first + slice_tokens] += down.product(activated)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.mm(x, matrix.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), matrix.float().t())
