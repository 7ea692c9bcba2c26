"""Random weights in any format, straight in the form that the kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from headwater.bench.timing import huge_buffer
from headwater.kernels import Matrix

if TYPE_CHECKING:
    from torch import Tensor

Format = Literal["bf16", "fp8", "int4", "mxfp4"]
FORMATS: tuple[Format, ...] = ("bf16", "fp8", "int4", "mxfp4")
FP8_BLOCK = 128
INT4_GROUP = 128
MXFP4_GROUP = 32


def random_matrix(stack: tuple[int, ...], rows: int, columns: int, fmt: Format) -> Matrix:
    """A stack of matrices [rows, columns] with values of about 1 / sqrt(columns)."""
    spread = columns**-0.5
    if fmt == "bf16":
        weight = _buffer((*stack, rows, columns), torch.bfloat16)
        weight.view(-1)[:] = _tile(weight.numel(), torch.randn(1 << 20) * spread)
        return Matrix.bf16(weight)
    if fmt == "fp8":
        codes = _buffer((*stack, rows, columns), torch.uint8)
        tile = torch.randn(1 << 20).mul(64).to(torch.float8_e4m3fn).view(torch.uint8)
        codes.view(-1)[:] = _tile(codes.numel(), tile)
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        scale = torch.full((*stack, *blocks), spread / 64)
        return Matrix.fp8(codes.view(torch.float8_e4m3fn), scale)
    packed = _buffer((*stack, rows, columns // 2), torch.uint8)
    packed.view(-1)[:] = _tile(packed.numel(), torch.randint(256, (1 << 20,)).to(torch.uint8))
    if fmt == "int4":
        scale = torch.full((*stack, rows, columns // INT4_GROUP), spread / 4, dtype=torch.bfloat16)
        return Matrix.int4(packed.view(torch.int32), scale)
    exponents = torch.full((*stack, rows, columns // MXFP4_GROUP), 121, dtype=torch.uint8)
    return Matrix.mxfp4(packed, exponents)


def _buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return huge_buffer(num_bytes).view(dtype).view(shape)


def _tile(count: int, tile: Tensor) -> Tensor:
    """`tile` again and again, `count` elements in all."""
    return tile.repeat(-(-count // tile.numel()))[:count]
