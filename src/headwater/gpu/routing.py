"""Which rows go to which expert: the gate's choice, sorted, and cut into tiles.

Owns the one thing of a layer that the host must know before it can go on: how many rows each
expert has. Copies queued before keep running meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu import precision
from headwater.gpu.kernels.experts import Piece, Tiles, cut_into_tiles
from headwater.gpu.kernels.table import tile_rows
from headwater.gpu.memory_plan import MAX_ROWS, SLICE_TOKENS
from headwater.model.gate import choose_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.gpu.dense import DenseWeights
    from headwater.model.layer_spec import MoeFfnSpec


@dataclass(frozen=True, slots=True)
class Routing:
    """A layer's rows sorted by expert; rows of experts of other ranks come last, uncounted.

    `index`, INT32 [rows], is the token of each sorted row; `places`, INT32 [T, k], the sorted row
    of each choice and `weights`, FP32 [T, k], its weight. `table` is [3, tiles] of all `pieces`.
    """

    index: Tensor
    places: Tensor
    weights: Tensor
    table: Tensor
    pieces: list[Piece]
    tile_rows: int

    def tiles(self, piece: Piece) -> Tiles:
        """One piece's tiles."""
        table = self.table[:, piece.first_tile : piece.end_tile]
        return Tiles(table, piece.first_row, piece.end_row - piece.first_row, self.tile_rows)


def gate(spec: MoeFfnSpec, hidden: Tensor, weights: DenseWeights) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, FP32 [T, hidden] -> norm(hidden) in FP16, experts int64 and weights FP32 [T, k]."""
    matrix = weights.floats("gate")
    bias = weights.floats("gate.bias") if spec.has_bias else None
    num_tokens, choices = hidden.shape[0], spec.experts_per_token
    x = torch.empty(hidden.shape, dtype=precision.ROUNDED, device=hidden.device)
    experts = torch.empty(num_tokens, choices, dtype=torch.int64, device=hidden.device)
    shares = torch.empty(num_tokens, choices, device=hidden.device)
    for first in range(0, num_tokens, SLICE_TOKENS):
        rows = slice(first, first + SLICE_TOKENS)
        normal = weights.norm("ffn_norm", hidden[rows])
        x[rows] = normal
        experts[rows], shares[rows] = choose_experts(spec, torch.mm(normal, matrix.t()), bias)
    return x, experts, shares


def route(
    experts: Tensor,
    weights: Tensor,
    owned: range,
    group_sizes: Sequence[int],
    *,
    is_quantized: bool = False,
    max_rows: int = MAX_ROWS,
) -> Routing:
    """Sorts the choices of int64 `experts` [T, k]; those of `owned` come in groups of so many.

    `is_quantized` says whether their rows may be E4M3, which has tiles of its own.
    """
    num_tokens, choices = experts.shape
    # Other ranks' experts sort behind all of ours.
    local = experts.flatten() - owned.start
    local = torch.where((local >= 0) & (local < len(owned)), local, len(owned))
    order = local.argsort(stable=True)
    numbered = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbered)
    counts = torch.zeros(len(owned) + 1, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    numbers: list[int] = counts[:-1].tolist()
    height = tile_rows(sum(numbers) / max(1, len(owned)), is_quantized=is_quantized)
    table, pieces = cut_into_tiles(numbers, group_sizes, height, max_rows)
    return Routing(
        index=(order // choices).int(),
        places=places.view(num_tokens, choices).int(),
        weights=weights,
        table=torch.from_numpy(table).to(experts.device, non_blocking=True),
        pieces=pieces,
        tile_rows=height,
    )
