"""Rows of the device's cache: who is where, against a copy of what lies there."""

from __future__ import annotations

import random

import pytest

from headwater.gpu.row_table import RowTable


@pytest.mark.parametrize("seed", range(8))
def test_contents_follow_the_table(seed: int) -> None:
    """Any sets in any order: those of a step are in front, each with its own contents."""
    noise = random.Random(seed)
    num_rows = noise.randrange(1, 7)
    table = RowTable(num_rows)
    contents: list[tuple[int, int] | None] = [None] * num_rows
    for _ in range(300):
        wanted = noise.sample(range(12), noise.randrange(1, num_rows + 1))
        for swap in table.arrange(wanted):
            assert swap.num_tokens <= 50
            a, b = swap.first, swap.second
            contents[a], contents[b] = contents[b], contents[a]
        assert {r.sequence_id for r in table.rows[: len(wanted)] if r is not None} == set(wanted)
        found = [row.sequence_id for row in table.rows if row is not None]
        assert len(set(found)) == len(found)
        for place, row in enumerate(table.rows):
            if row is None or row.num_tokens == 0:
                continue
            assert contents[place] == (row.sequence_id, row.num_tokens), f"seed {seed}"
        for place, row in enumerate(table.rows[: len(wanted)]):
            assert row is not None
            row.num_tokens = min(50, row.num_tokens + 1)
            contents[place] = (row.sequence_id, row.num_tokens)


def test_who_was_used_longest_ago_leaves() -> None:
    table = RowTable(3)
    for wanted in ([1], [2], [3], [1], [4]):
        table.arrange(wanted)
    assert {row.sequence_id for row in table.rows if row is not None} == {1, 3, 4}


def test_a_steady_batch_moves_nothing() -> None:
    table = RowTable(4)
    table.arrange([5, 6, 7])
    assert table.arrange([7, 5, 6]) == []
    assert table.find(8) is None
