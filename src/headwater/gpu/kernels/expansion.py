"""Experts' weights of any format to FP16 (Triton), for products that meet each of them often.

Owns the cut: a program expands some rows of one group of columns, which share a scale.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwater.gpu.kernels.experts import ExpertStack, Stack
from headwater.gpu.kernels.weights import format_on, group_columns, weight_scale, weight_tile

_ELEMENTS = 8192


@triton.jit
def _expand(
    values,
    scales,
    zeros,
    out,
    num_groups,
    rows: tl.constexpr,
    columns: tl.constexpr,
    fmt: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    matrix = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * block_n + tl.arange(0, block_n)
    group = tl.program_id(2)
    row_size = columns // 2 if fmt >= 3 else columns
    scale_rows = tl.cdiv(rows, 128) if fmt == 1 or fmt == 2 else rows
    weight_zeros = zeros
    if zeros is not None:
        weight_zeros = zeros + matrix * rows * num_groups
    weight = weight_tile(
        values + matrix * rows * row_size, weight_zeros, row, group * block_k, rows, columns,
        group, num_groups, fmt, block_k, tl.float32,
    )  # fmt: skip
    if scales is not None:
        weight_scales = scales + matrix * scale_rows * num_groups
        weight *= weight_scale(weight_scales, row, rows, group, num_groups, fmt)[:, None]
    column = group * block_k + tl.arange(0, block_k)
    place = (matrix * rows + row[:, None]) * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + place, weight.to(tl.float16), mask=mask)


def expand(stack: ExpertStack) -> ExpertStack:
    """The same experts in FP16, scales and zeros multiplied in."""
    return ExpertStack(_expanded(stack.gate_up), _expanded(stack.down))


def _expanded(stack: Stack) -> Stack:
    shape = (*stack.values.shape[:3], stack.rows, stack.columns)
    out = torch.empty(shape, dtype=torch.float16, device=stack.values.device)
    fmt, values = format_on(stack)
    block_k = group_columns(stack)
    block_n = max(16, _ELEMENTS // block_k)
    groups = triton.cdiv(stack.columns, block_k)
    _expand[(shape[0] * shape[1] * shape[2], triton.cdiv(stack.rows, block_n), groups)](
        values,
        stack.scale,
        stack.zero,
        out,
        groups,
        rows=stack.rows,
        columns=stack.columns,
        fmt=fmt,
        block_n=block_n,
        block_k=block_k,
    )
    return Stack(out)
