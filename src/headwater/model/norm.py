"""Root-mean-square normalisation in FP32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """x / rms(x) * weight over the last dimension; `weight` [N] is kept as FP32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.to(torch.float32)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """FP32 [..., N] -> FP32 [..., N]."""
        return functional.rms_norm(x, self._weight.shape, self._weight, self._eps)
