"""Weights of every format as a kernel reads them (Triton): codes to numbers, and their scales.

Owns the numbers of the formats within kernels.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.gpu.kernels.experts import Stack
from headwater.gpu.kernels.table import capability_of

_PLAIN, _FP8, _FP8_BITS, _INT4, _MXFP4 = range(5)
_FORMATS = {"fp16": _PLAIN, "bf16": _PLAIN, "fp8": _FP8, "int4": _INT4, "mxfp4": _MXFP4}
# Cards from here on convert E4M3 and multiply it; older ones get the codes' bits.
_FP8_CAPABILITY = (8, 9)
_PLAIN_BLOCK_K = 64


def format_on(stack: Stack) -> tuple[int, Tensor]:
    """The number of its format, and its values, as kernels on its device get them."""
    fmt, values = _FORMATS[stack.format], stack.values
    if fmt == _FP8 and capability_of(values.device) < _FP8_CAPABILITY:
        return _FP8_BITS, values.view(torch.uint8)
    return fmt, values


def group_columns(stack: Stack) -> int:
    """Columns that kernels read at a time: those that share a scale."""
    return stack.group or _PLAIN_BLOCK_K


@triton.jit
def _expand_e4m3(code):
    """Bytes of E4M3 -> FP32 for cards that cannot."""
    exponent = (code >> 3) & 15
    fraction = code & 7
    normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -magnitude, magnitude)


@triton.jit
def _expand_e2m1(code):
    """Codes of E2M1 -> FP32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent = (code >> 1) & 3
    fraction = (code & 1).to(tl.float32)
    power = (1 << exponent).to(tl.float32)
    magnitude = tl.where(exponent == 0, 0.5 * fraction, (2.0 + fraction) * power * 0.25)
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def weight_tile(
    values,
    zeros,
    row,
    column,
    num_rows,
    num_columns,
    group,
    num_groups,
    fmt: tl.constexpr,
    block_k: tl.constexpr,
    product: tl.constexpr,
):
    """Weight rows by `block_k` columns, expanded but not scaled."""
    if fmt >= 3:
        byte = column // 2 + tl.arange(0, block_k // 2)[None, :]
        place = row[:, None].to(tl.int64) * (num_columns // 2) + byte
        mask = (row < num_rows)[:, None] & (byte < num_columns // 2)
        codes = tl.load(values + place, mask=mask, other=0).to(tl.int32)
        codes = tl.interleave(codes & 15, codes >> 4)
        if fmt == 4:
            return _expand_e2m1(codes).to(product)
        zero = tl.full((row.shape[0],), 8, tl.int32)
        if zeros is not None:
            mask_rows = row < num_rows
            zero = tl.load(zeros + row.to(tl.int64) * num_groups + group, mask=mask_rows, other=0)
            zero = zero.to(tl.int32)
        return (codes - zero[:, None]).to(tl.float32).to(product)
    columns = column + tl.arange(0, block_k)[None, :]
    place = row[:, None].to(tl.int64) * num_columns + columns
    mask = (row < num_rows)[:, None] & (columns < num_columns)
    found = tl.load(values + place, mask=mask, other=0.0)
    if fmt == 2:
        return _expand_e4m3(found.to(tl.int32)).to(product)
    if fmt == 0 and found.dtype != product:
        return found.to(tl.float32).to(product)
    return found.to(product)


@triton.jit
def weight_scale(scales, row, num_rows, group, num_groups, fmt: tl.constexpr):
    """FP32 [rows]: the scale of each weight row in this group of columns."""
    if fmt == 1 or fmt == 2:
        place = (row // 128) * num_groups + group
    else:
        place = row.to(tl.int64) * num_groups + group
    scale = tl.load(scales + place, mask=row < num_rows, other=0)
    if fmt == 4:
        bits = scale.to(tl.int32)
        # Byte 0 stands for 2^-127, which FP32 only has as a subnormal number.
        shifted = tl.where(bits == 0, 1 << 22, bits << 23)
        return shifted.to(tl.float32, bitcast=True)
    return scale.to(tl.float32)
