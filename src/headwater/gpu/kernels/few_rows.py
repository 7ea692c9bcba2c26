"""Products of a few tokens with a weight in E4M3 (Triton): bound by reading the weight once.

Owns the cut: weight rows and columns are shared out so that every multiprocessor reads, and the
partial sums of the columns' pieces are added afterwards, in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.gpu.kernels.experts import FP8_BLOCK
from headwater.gpu.kernels.grouped import product_type

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class OneTokenTile:
    """A program's rows, and what it reads at a time: groups of 128 columns, so many ahead."""

    rows: int
    groups: int
    warps: int
    stages: int


def one_token_tile(groups: int) -> OneTokenTile:
    """For rows of so many groups: three steps or more, so that reading never rests (H200)."""
    return OneTokenTile(8, 8, 4, 4) if groups >= 24 else OneTokenTile(16, 4, 2, 4)


_ROWS = 64
# Programs wanted at once: a few for each multiprocessor of a large card.
_PROGRAMS = 512
_STAGES = 4


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x,
    values,
    scales,
    partial,
    num_tokens,
    rows: tl.constexpr,
    columns: tl.constexpr,
    blocks_each: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    product: tl.constexpr,
):
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    token = tl.arange(0, block_m)
    num_groups: tl.constexpr = (columns + 127) // 128
    total = tl.zeros((block_n, block_m), dtype=tl.float32)
    for step in range(0, blocks_each):
        group = tl.program_id(1) * blocks_each + step
        column = group * 128 + tl.arange(0, 128)
        is_there = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        weight = tl.load(values + place, mask=is_there, other=0.0).to(product)
        mask = (token < num_tokens)[None, :] & (column < columns)[:, None]
        tokens = tl.load(x + token[None, :] * columns + column[:, None], mask=mask, other=0.0)
        scale = tl.load(
            scales + row // 128 * num_groups + group,
            mask=(row < rows) & (group < num_groups),
            other=0.0,
        )
        total += tl.dot(weight, tokens.to(tl.float32).to(product)) * scale[:, None]
    target = (tl.program_id(1) * num_tokens + token)[None, :] * rows + row[:, None]
    tl.store(partial + target, total, mask=(token < num_tokens)[None, :] & (row < rows)[:, None])


@triton.jit
def _multiply_one(
    x,
    values,
    scales,
    out,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block_n: tl.constexpr,
    block_g: tl.constexpr,
    stages: tl.constexpr,
):
    """One token: plain multiplications, as tiles of one are mostly empty.

    A program owns a few whole rows, so that nothing is left to be added up. Each step reads
    `block_g` groups of 128 columns, which share a scale per row block.
    """
    first = tl.program_id(0) * block_n
    row = first + tl.arange(0, block_n)
    inner = tl.arange(0, 128)
    num_groups: tl.constexpr = (columns + 127) // 128
    total = tl.zeros((block_n, block_g, 128), dtype=tl.float32)
    for step in tl.range(0, (num_groups + block_g - 1) // block_g, num_stages=stages):
        group = step * block_g + tl.arange(0, block_g)
        column = group[:, None] * 128 + inner[None, :]
        is_there = column < columns
        # All rows of a program lie in one block of scales.
        scale = tl.load(
            scales + first // 128 * num_groups + group, mask=group < num_groups, other=0.0
        )
        token = tl.load(x + column, mask=is_there, other=0.0).to(tl.float32) * scale[:, None]
        place = row[:, None, None].to(tl.int64) * columns + column[None]
        mask = (row < rows)[:, None, None] & is_there[None]
        total += tl.load(values + place, mask=mask, other=0.0).to(tl.float32) * token[None]
    tl.store(out + row, tl.sum(tl.sum(total, axis=2), axis=1), mask=row < rows)


def few_rows_pieces(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x, FP16 [T, K] with T up to 64, times the transposed E4M3 [N, K].

    FP32 [pieces, T, N], to be added up by whoever reads it.
    """
    (num_tokens, columns), rows = x.shape, values.shape[0]
    assert num_tokens <= MAX_TOKENS, "made for few tokens"
    groups = triton.cdiv(columns, FP8_BLOCK)
    if num_tokens == 1:
        out = torch.empty(1, 1, rows, device=x.device)
        one = one_token_tile(groups)
        _multiply_one[(triton.cdiv(rows, one.rows),)](
            x,
            values,
            scales,
            out,
            rows,
            columns,
            one.rows,
            one.groups,
            one.stages,
            num_warps=one.warps,
        )
        return out
    row_blocks = triton.cdiv(rows, _ROWS)
    blocks_each = max(1, groups * row_blocks // _PROGRAMS)
    pieces = triton.cdiv(groups, blocks_each)
    partial = torch.empty(pieces, num_tokens, rows, device=x.device)
    _multiply[(row_blocks, pieces)](
        x,
        values,
        scales,
        partial,
        num_tokens,
        rows=rows,
        columns=columns,
        blocks_each=blocks_each,
        block_m=max(16, triton.next_power_of_2(num_tokens)),
        block_n=_ROWS,
        product=product_type(x.dtype),
        num_warps=4,
        num_stages=_STAGES,
    )
    return partial
