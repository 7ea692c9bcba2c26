"""Which rows of a batch a rank computes.

Owns the stripes: with W ranks each sequence's new tokens are cut into 2 W runs of about equal
length, and rank r gets run r and run 2 W - 1 - r. As later tokens see more of the context, every
rank has about the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.model.batch import Batch, SequenceSpan


@dataclass(frozen=True, slots=True)
class QueryPart:
    """Neighbouring queries of one sequence: this rank's `rows`, from the span's `first` on."""

    rows: slice
    first: int

    @property
    def count(self) -> int:
        """How many there are."""
        length: int = self.rows.stop - self.rows.start
        return length


@dataclass(frozen=True, slots=True)
class Portion:
    """A rank's rows of `batch`, with their `positions`, `blocks` and `offsets`, int64 [n].

    `parts` holds the queries of each of the batch's spans. `rows_by_rank` says, for every rank,
    which of the batch's rows it has, in its own order.
    """

    batch: Batch
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    parts: tuple[tuple[SequenceSpan, tuple[QueryPart, ...]], ...]
    rows_by_rank: tuple[Tensor, ...]

    def rows_of(self, spans: Sequence[int]) -> Tensor:
        """Which of the rank's rows are those of the batch's spans of these numbers, int64 [m]."""
        parts = [part.rows for index in spans for part in self.parts[index][1]]
        rows = [torch.arange(part.start, part.stop) for part in parts]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def portion_of(batch: Batch, rank: int = 0, world_size: int = 1) -> Portion:
    """The rows of `rank`; of a single one, all of them in their order."""
    rows_by_rank = tuple(_rows(batch, r, world_size) for r in range(world_size))
    rows = rows_by_rank[rank]
    parts = []
    first_row = 0
    for span in batch.spans:
        mine = []
        for first, stop in _runs(span.num_new, rank, world_size):
            mine.append(QueryPart(slice(first_row, first_row + stop - first), first))
            first_row += stop - first
        parts.append((span, tuple(mine)))
    return Portion(
        batch,
        batch.positions[rows],
        batch.blocks[rows],
        batch.offsets[rows],
        tuple(parts),
        rows_by_rank,
    )


def _rows(batch: Batch, rank: int, world_size: int) -> Tensor:
    runs = [
        torch.arange(span.first_row + first, span.first_row + stop)
        for span in batch.spans
        for first, stop in _runs(span.num_new, rank, world_size)
    ]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def _runs(count: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """The runs of `count` tokens that a rank has, as [first, stop); empty ones are left out."""
    if world_size == 1:
        return [(0, count)]
    pieces = 2 * world_size
    found = [
        (count * piece // pieces, count * (piece + 1) // pieces)
        for piece in (rank, pieces - 1 - rank)
    ]
    return [(first, stop) for first, stop in found if stop > first]
