"""The expert kernels in plain torch: what the Triton ones are held against, and the CPU's.

Owns the numeric policy: weights have their exact values, or those rounded to FP16 where each is met
by many rows; sums are FP32; activations are FP16 (see precision.py), or E4M3 with one scale per
1 x 128 (DeepSeek-V3 technical report, section 3.3.2), in which case each block of 128 columns is
summed apart and then scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headwater.gpu.kernels.experts import FP8_BLOCK, ExpertStack, Stack
from headwater.gpu.precision import ACTIVATED_SCALE, brought_near
from headwater.model.expand import rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.gpu.kernels.experts import Rows, Tiles

E4M3_MAX = 448.0
# Keeps scales of rows that are all zero away from zero.
_LEAST_SCALE = 1e-10


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C] -> E4M3 [R, C], FP32 [R, ceil(C/128)]: each block's greatest magnitude becomes 448."""
    num_rows, columns = x.shape
    padded = functional.pad(x.float(), (0, -columns % FP8_BLOCK))
    blocks = padded.view(num_rows, -1, FP8_BLOCK)
    scale = (blocks.abs().amax(dim=-1) / E4M3_MAX).clamp_min(_LEAST_SCALE)
    values = (blocks / scale[..., None]).flatten(1)[:, :columns]
    return values.to(torch.float8_e4m3fn), scale


def expand(stack: ExpertStack) -> ExpertStack:
    """The same experts in FP16, scales and zeros multiplied in."""
    return ExpertStack(_expanded(stack.gate_up), _expanded(stack.down))


def gate_up(x: Rows, stack: ExpertStack, tiles: Tiles, out: Rows) -> None:
    """Overwrites `out` [rows, shards * I] with silu(gate(x)) * up(x).

    What is not quantised has been multiplied by ACTIVATED_SCALE.
    """
    weights = stack.gate_up
    for expert, first, stop in tiles.table.T.tolist():
        rows = _values(x, first, stop, tiles, 1)
        pieces = []
        for shard in range(weights.num_shards):
            gate, up = (rows @ _matrix(weights, expert, shard, i).t() for i in (0, 1))
            pieces.append(functional.silu(gate) * up)
        target = slice(first - tiles.first_row, stop - tiles.first_row)
        if out.scale is None:
            out.values[target] = brought_near(torch.cat(pieces, dim=1)).to(out.values.dtype)
        else:
            quantized = [quantize(piece) for piece in pieces]
            out.values[target] = torch.cat([values for values, _ in quantized], dim=1)
            out.scale[target] = torch.cat([scale for _, scale in quantized], dim=1)


def down(x: Rows, stack: ExpertStack, tiles: Tiles, out: Tensor) -> None:
    """Overwrites `out` [rows, H] with the sum over shards of x times down transposed.

    `x` is what gate_up gave.
    """
    weights = stack.down
    for expert, first, stop in tiles.table.T.tolist():
        rows = _values(x, first, stop, tiles, weights.num_shards)
        shards = rows.view(stop - first, weights.num_shards, -1)
        total = sum(
            shards[:, shard] @ _matrix(weights, expert, shard, 0).t()
            for shard in range(weights.num_shards)
        )
        assert not isinstance(total, int)
        if x.scale is None:
            total /= ACTIVATED_SCALE
        out[first - tiles.first_row : stop - tiles.first_row] = total.to(out.dtype)


def add_weighted(
    hidden: Tensor, outputs: Tensor, places: Tensor, weights: Tensor, first: int
) -> None:
    """hidden[t] += sum over j of weights[t, j] * outputs[places[t, j] - first], where that exists.

    `hidden` is FP32 [T, H], `outputs` [R, H]; `places` INT32 and `weights` FP32 are [T, k]. Terms
    are added in the order of j, so that the result does not depend on other tokens.
    """
    for choice in range(places.shape[1]):
        row = places[:, choice].long() - first
        is_here = (row >= 0) & (row < outputs.shape[0])
        tokens = is_here.nonzero()[:, 0]
        terms = outputs[row[tokens]].float() * weights[tokens, choice, None]
        hidden[tokens] += terms


def _expanded(stack: Stack) -> Stack:
    experts, shards, matrices = stack.values.shape[:3]
    out = torch.empty(experts, shards, matrices, stack.rows, stack.columns, dtype=torch.float16)
    for expert in range(experts):
        for shard in range(shards):
            for matrix in range(matrices):
                out[expert, shard, matrix] = _matrix(stack, expert, shard, matrix)
    return Stack(out)


def _values(x: Rows, first: int, stop: int, tiles: Tiles, num_shards: int) -> Tensor:
    """Rows [first, stop) of the sorted ones, in FP32."""
    if x.index is not None:
        rows = x.index[first:stop].long()
    else:
        rows = torch.arange(first - tiles.first_row, stop - tiles.first_row)
    values = x.values[rows].float()
    if x.scale is None:
        return values
    per_shard = values.view(stop - first, num_shards, -1)
    scale = x.scale[rows].view(stop - first, num_shards, -1)
    scale = scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., : per_shard.shape[-1]]
    return (per_shard * scale).flatten(1)


def _matrix(stack: Stack, expert: int, shard: int, matrix: int) -> Tensor:
    """One matrix in FP32 [N, K]."""
    place = (expert, shard, matrix)
    source = rows_of(
        stack.values[place],
        None if stack.scale is None else stack.scale[place],
        None if stack.zero is None else stack.zero[place],
    )
    out = torch.empty(stack.rows, stack.columns, device=stack.values.device)
    source.expand(0, out)
    return out
