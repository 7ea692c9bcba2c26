"""Kernels of the routed experts, on the device of their tensors.

Owns the choice: Triton on a GPU, plain torch (reference.py) elsewhere. Both have the same face.
Whoever imports it starts Triton's kernels without a C compiler.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from headwater.gpu.kernels import reference

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.gpu.kernels.experts import ExpertStack, Rows, Tiles

if importlib.util.find_spec("triton") is not None:
    from headwater.gpu.kernels.triton_driver import use_driver

    use_driver()


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in E4M3 with one FP32 scale per 128 columns; see reference.quantize."""
    if x.is_cuda:
        from headwater.gpu.kernels.activations import quantize as on_gpu

        return on_gpu(x)
    return reference.quantize(x)


def expand(stack: ExpertStack) -> ExpertStack:
    """The experts in FP16; see reference.expand."""
    if stack.gate_up.values.is_cuda:
        from headwater.gpu.kernels.expansion import expand as on_gpu

        return on_gpu(stack)
    return reference.expand(stack)


def gate_up(x: Rows, stack: ExpertStack, tiles: Tiles, out: Rows) -> None:
    """silu(x * gate^T) * (x * up^T) of the tiles' rows; see reference.gate_up."""
    if x.values.is_cuda:
        from headwater.gpu.kernels.grouped import gate_up as on_gpu

        on_gpu(x, stack, tiles, out)
    else:
        reference.gate_up(x, stack, tiles, out)


def down(x: Rows, stack: ExpertStack, tiles: Tiles, out: Tensor) -> None:
    """x * down^T of the tiles' rows; see reference.down."""
    if x.values.is_cuda:
        from headwater.gpu.kernels.grouped import down as on_gpu

        on_gpu(x, stack, tiles, out)
    else:
        reference.down(x, stack, tiles, out)


def add_weighted(
    hidden: Tensor, outputs: Tensor, places: Tensor, weights: Tensor, first: int
) -> None:
    """Adds experts' outputs to their tokens; see reference.add_weighted."""
    if hidden.is_cuda:
        from headwater.gpu.kernels.combine import add_weighted as on_gpu

        on_gpu(hidden, outputs, places, weights, first)
    else:
        reference.add_weighted(hidden, outputs, places, weights, first)
