"""Grouped products of rows with their experts (Triton); reference.py says what they compute.

A program owns one tile: `block_n` weight rows of one expert and shard by up to `block_m` of its
tokens. Weights are the left operand, tokens the right one, so that few tokens still fill a tensor
core's tile and codes of any format are expanded in registers, unless that has been done before
(expansion.py). Each group of columns that shares a scale is summed in the tensor cores and then
scaled into FP32 sums, which also bounds the rounding of the tensor cores' own FP8 sums (DeepSeek-V3
technical report, section 3.3.2).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.gpu.kernels.experts import ExpertStack, Rows, Stack, Tiles
from headwater.gpu.kernels.pieces import within_half
from headwater.gpu.kernels.table import TileConfig, capability_of, shapes_for
from headwater.gpu.kernels.weights import format_on, group_columns, weight_scale, weight_tile
from headwater.gpu.precision import ACTIVATED_SCALE

# The interpreter multiplies the bits of BF16 as if they were integers (Triton 3.6), so its products
# are FP32; on a GPU this is never the case.
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
_PRODUCTS = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


# What changes from layer to layer must not make another variant of the kernel: compiling one takes
# seconds.
@triton.jit(
    do_not_specialize=["tile_stride", "first_row"],
    do_not_specialize_on_alignment=["tiles"],
)
def _grouped(
    x,
    x_scales,
    index,
    values,
    scales,
    zeros,
    out,
    out_scales,
    tiles,
    tile_stride,
    first_row,
    num_groups,
    x_width,
    out_width,
    rows: tl.constexpr,
    columns: tl.constexpr,
    fmt: tl.constexpr,
    is_gated: tl.constexpr,
    out_shards: tl.constexpr,
    in_shards: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    product: tl.constexpr,
    factor: tl.constexpr,
):
    # Neighbouring programs share weights: all tiles of one expert follow each other.
    row_blocks: tl.constexpr = (rows + block_n - 1) // block_n
    program = tl.program_id(0)
    tile = program // (out_shards * row_blocks)
    part = program % (out_shards * row_blocks)
    shard = part // row_blocks
    row_block = part % row_blocks
    expert = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + tile_stride + tile)
    stop = tl.load(tiles + 2 * tile_stride + tile)

    matrices: tl.constexpr = 2 if is_gated else 1
    # Bytes of two codes have half the columns.
    row_size = columns // 2 if fmt >= 3 else columns
    scale_rows = tl.cdiv(rows, 128) if fmt == 1 or fmt == 2 else rows
    row = row_block * block_n + tl.arange(0, block_n)
    token = first + tl.arange(0, block_m)
    is_token = token < stop
    source = (token - first_row).to(tl.int64)
    if index is not None:
        source = tl.load(index + token, mask=is_token, other=0).to(tl.int64)

    total = tl.zeros((block_n, block_m), dtype=tl.float32)
    total_up = total
    for in_shard in tl.static_range(in_shards):
        member = (expert * (out_shards * in_shards) + shard + in_shard) * matrices
        weights = values + member * rows * row_size
        weight_scales, weight_zeros = scales, zeros
        if scales is not None:
            weight_scales = scales + member * scale_rows * num_groups
        if zeros is not None:
            weight_zeros = zeros + member * rows * num_groups
        for group in range(0, (columns + block_k - 1) // block_k):
            column = group * block_k
            inner = column + tl.arange(0, block_k)
            place = source[None, :] * x_width + (in_shard * columns + inner)[:, None]
            mask = is_token[None, :] & (inner < columns)[:, None]
            tokens = tl.load(x + place, mask=mask, other=0.0)
            if tokens.dtype != product:
                tokens = tokens.to(tl.float32).to(product)
            weight = weight_tile(
                weights, weight_zeros, row, column, rows, columns, group, num_groups, fmt,
                block_k, product,
            )  # fmt: skip
            if x_scales is not None:
                x_groups = tl.cdiv(columns, 128)
                x_scale = tl.load(
                    x_scales + source * (in_shards * x_groups) + in_shard * x_groups + group,
                    mask=is_token, other=0.0,
                )  # fmt: skip
            if fmt == 0:
                total = tl.dot(weight, tokens, total)
            else:
                scale = weight_scale(weight_scales, row, rows, group, num_groups, fmt)
                term = tl.dot(weight, tokens) * scale[:, None]
                if x_scales is not None:
                    term *= x_scale[None, :]
                total += term
            if is_gated:
                up_zeros = weight_zeros
                if zeros is not None:
                    up_zeros = weight_zeros + rows * num_groups
                weight = weight_tile(
                    weights + rows * row_size, up_zeros, row, column, rows, columns, group,
                    num_groups, fmt, block_k, product,
                )  # fmt: skip
                if fmt == 0:
                    total_up = tl.dot(weight, tokens, total_up)
                else:
                    up_scales = weight_scales + scale_rows * num_groups
                    scale = weight_scale(up_scales, row, rows, group, num_groups, fmt)
                    term = tl.dot(weight, tokens) * scale[:, None]
                    if x_scales is not None:
                        term *= x_scale[None, :]
                    total_up += term

    if is_gated:
        total = total / (1.0 + tl.exp(-total)) * total_up
    total *= factor
    if out.dtype.element_ty == tl.float16:
        total = within_half(total)
    target = (token - first_row).to(tl.int64)
    place = target[None, :] * out_width + (shard * rows + row)[:, None]
    mask = is_token[None, :] & (row < rows)[:, None]
    if out_scales is not None:
        # A tile is as wide as a block of the activations' scales.
        peak = tl.max(tl.abs(tl.where(mask, total, 0.0)), axis=0)
        out_scale = tl.maximum(peak / 448.0, 1e-10)
        total = total / out_scale[None, :]
        scale_place = target * (out_shards * row_blocks) + shard * row_blocks + row_block
        tl.store(out_scales + scale_place, out_scale, mask=is_token)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def gate_up(
    x: Rows, stack: ExpertStack, tiles: Tiles, out: Rows, config: TileConfig | None = None
) -> None:
    """Overwrites `out` [rows, shards * I]; see reference.gate_up.

    `config` is for measuring; otherwise the table says what suits the card.
    """
    _launch(x, stack.gate_up, tiles, out, config, is_gated=True)


def down(
    x: Rows, stack: ExpertStack, tiles: Tiles, out: Tensor, config: TileConfig | None = None
) -> None:
    """Overwrites `out` [rows, H]; see reference.down."""
    _launch(x, stack.down, tiles, Rows(out), config, is_gated=False)


def _launch(
    x: Rows, stack: Stack, tiles: Tiles, out: Rows, config: TileConfig | None, *, is_gated: bool
) -> None:
    capability = capability_of(x.values.device)
    is_quantized = x.scale is not None
    if config is None:
        shapes = shapes_for(tiles.tile_rows, capability)
        down_shape = shapes.down_quantized if is_quantized else shapes.down
        config = shapes.gated if is_gated else down_shape
        assert config is not None, "no such tiles of quantised rows"
    fmt, values = format_on(stack)
    is_scaled = (out if is_gated else x).scale is None
    factor = ACTIVATED_SCALE if is_gated else 1 / ACTIVATED_SCALE
    row_blocks = triton.cdiv(stack.rows, config.block_n)
    out_shards, in_shards = (stack.num_shards, 1) if is_gated else (1, stack.num_shards)
    _grouped[(tiles.table.shape[1] * out_shards * row_blocks,)](
        x.values,
        x.scale,
        x.index,
        values,
        stack.scale,
        stack.zero,
        out.values,
        out.scale,
        tiles.table,
        tiles.table.stride(0),
        tiles.first_row,
        0 if stack.scale is None else stack.scale.shape[-1],
        x.values.shape[1],
        out.values.shape[1],
        rows=stack.rows,
        columns=stack.columns,
        fmt=fmt,
        is_gated=is_gated,
        out_shards=out_shards,
        in_shards=in_shards,
        block_m=tiles.tile_rows,
        block_n=config.block_n,
        block_k=group_columns(stack),
        product=product_type(x.values.dtype),
        factor=factor if is_scaled else 1.0,
        **_options(config),
    )


def product_type(activations: torch.dtype) -> Any:
    """What tokens of a type, and weights, are multiplied as."""
    return tl.float32 if _IS_INTERPRETED else _PRODUCTS[activations]


def _options(config: TileConfig) -> dict[str, int]:
    return {"num_warps": config.warps, "num_stages": config.stages}
