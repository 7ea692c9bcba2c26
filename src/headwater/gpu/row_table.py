"""Which sequence is in which row of a cache, so that those of a step are in the first rows.

Owns the choice of rows and of who has to leave; moves nothing itself. Pure bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Row:
    """A sequence's place: its first `num_tokens` tokens are there."""

    sequence_id: int
    num_tokens: int = 0
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class Swap:
    """Rows whose contents, no more than `num_tokens` tokens, change places."""

    first: int
    second: int
    num_tokens: int


class RowTable:
    """`num_rows` rows, empty at first."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[Row | None] = [None] * num_rows
        self._turn = 0

    def find(self, sequence_id: int) -> Row | None:
        """The row of a sequence, if it has one."""
        return next((r for r in self.rows if r is not None and r.sequence_id == sequence_id), None)

    def arrange(self, wanted: Sequence[int]) -> list[Swap]:
        """Brings `wanted` sequences, all different, no more than rows, into the first rows.

        Others stay somewhere as long as there is room; who was used longest ago leaves first. The
        swaps are to be done in order; the table says already what is true after them.
        """
        self._turn += 1
        swaps: list[Swap] = []
        chosen = set(wanted)
        # Rows among the first that somebody else has, or nobody.
        targets = [i for i in range(len(wanted)) if not self._holds(i, chosen)]
        for row in range(len(wanted), len(self.rows)):
            if self._holds(row, chosen):
                swaps.append(self._swap(targets.pop(0), row))
        present = {row.sequence_id for row in self.rows if row is not None}
        for sequence_id in wanted:
            if sequence_id in present:
                continue
            target = targets.pop(0)
            if self.rows[target] is not None:
                refuge = self._least_used(len(wanted), target)
                if refuge != target:
                    self.rows[refuge] = None
                    swaps.append(self._swap(target, refuge))
            self.rows[target] = Row(sequence_id)
        for found in self.rows[: len(wanted)]:
            assert found is not None
            found.used_at = self._turn
        return swaps

    def _holds(self, row: int, chosen: set[int]) -> bool:
        found = self.rows[row]
        return found is not None and found.sequence_id in chosen

    def _swap(self, first: int, second: int) -> Swap:
        counts = [
            0 if row is None else row.num_tokens for row in (self.rows[first], self.rows[second])
        ]
        self.rows[first], self.rows[second] = self.rows[second], self.rows[first]
        return Swap(first, second, max(counts))

    def _least_used(self, start: int, target: int) -> int:
        """Of the rows from `start` on and `target`, an empty one or the one used longest ago."""

        def age(row: int) -> int:
            found = self.rows[row]
            return -1 if found is None else found.used_at

        candidates: tuple[int, ...] = (*range(start, len(self.rows)), target)
        return min(candidates, key=age)
