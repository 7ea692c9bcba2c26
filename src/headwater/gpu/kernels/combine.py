"""Experts' outputs back to their tokens (Triton); reference.add_weighted says what it computes."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit(do_not_specialize=["first", "num_rows"])
def _add_weighted(
    hidden,
    outputs,
    places,
    weights,
    first,
    num_rows,
    width,
    choices: tl.constexpr,
    columns: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_there = column < width
    total = tl.zeros((columns,), dtype=tl.float32)
    num_found = 0
    for choice in tl.static_range(choices):
        row = tl.load(places + token * choices + choice) - first
        if (row >= 0) & (row < num_rows):
            weight = tl.load(weights + token * choices + choice)
            term = tl.load(outputs + row.to(tl.int64) * width + column, mask=is_there, other=0.0)
            total += weight * term.to(tl.float32)
            num_found += 1
    if num_found > 0:
        target = hidden + token.to(tl.int64) * width + column
        tl.store(target, tl.load(target, mask=is_there) + total, mask=is_there)


def add_weighted(
    hidden: Tensor, outputs: Tensor, places: Tensor, weights: Tensor, first: int
) -> None:
    """hidden[t] += sum over j of weights[t, j] * outputs[places[t, j] - first]."""
    num_tokens, width = hidden.shape
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, columns))
    _add_weighted[grid](
        hidden, outputs, places, weights, first, outputs.shape[0], width, places.shape[1], columns
    )
