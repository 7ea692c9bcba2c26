"""Weights as they lie in a segment, as the kernels' matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.kernels.matrix import Matrix

if TYPE_CHECKING:
    from headwater.model.source import Weights


def stored_matrix(weights: Weights, name: str) -> Matrix:
    """The linear weight `name`, or stack of them, in its format; see stored_fields.py."""
    weight = weights.tensor(name)
    if weight.dtype == torch.bfloat16:
        return Matrix.bf16(weight)
    scale = weights.tensor(f"{name}.scale")
    if weight.dtype == torch.float8_e4m3fn:
        return Matrix.fp8(weight, scale)
    if scale.dtype == torch.uint8:
        return Matrix.mxfp4(weight, scale)
    zero = weights.tensor(f"{name}.zero") if f"{name}.zero" in weights else None
    return Matrix.int4(weight, scale, zero)
