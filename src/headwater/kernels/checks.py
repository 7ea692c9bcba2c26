"""Checks of tensors whose addresses go to native code."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.errors import InternalError


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises InternalError unless `tensor` is a contiguous CPU tensor of that type and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise InternalError(
            f"{name}: expected {dtype} of shape {list(shape)}, "
            f"got {tensor.dtype} of shape {list(tensor.shape)}"
        )
    check_layout(name, tensor)


def check_layout(name: str, tensor: Tensor) -> None:
    """Raises InternalError unless `tensor` is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InternalError(f"{name}: expected a contiguous tensor on the CPU, got {tensor.device}")


def rows_of(name: str, tensor: Tensor) -> int:
    """The first of two dimensions; raises InternalError when there are not two."""
    if tensor.dim() != 2:
        raise InternalError(f"{name}: expected two dimensions, got {list(tensor.shape)}")
    return tensor.shape[0]
