"""Matrices as they lie in the weights segment, and products with them.

Owns the numeric policy of every linear operation: the weight's values are used exactly (see
expand.py for each format), the input has been rounded to BF16, and products are accumulated and
returned in FP32. As torch has no such product on a CPU, weights are expanded to FP32 a few rows at
a time into one small scratch that stays in the cache; a weight is never copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from headwater.model.expand import PlainRows, rows_of

# 2 MiB of FP32: fits the L2 caches of two cores, and is large enough to keep both busy (measured:
# lm_head of the default model takes 4.9 ms at one token, 8.5 ms with half of it).
_SCRATCH_ELEMENTS = 1 << 19
# Chunks are whole blocks of every format.
_ROW_STEP = 128


_keeps_activations = ContextVar("keeps_activations", default=False)


@contextmanager
def exact_activations() -> Iterator[None]:
    """Within, nothing is rounded: what that loses is measured against this, and nothing else."""
    token = _keeps_activations.set(True)
    try:
        yield
    finally:
        _keeps_activations.reset(token)


def round_activations(x: Tensor) -> Tensor:
    """FP32 values rounded to the nearest BF16, still as FP32: what Matrix.matmul expects."""
    return x if _keeps_activations.get() else x.bfloat16().float()


class Scratch:
    """FP32 working memory that all matrices of a model share; not for use by two threads at once.

    It is allocated while the model is built, and never during a forward pass.
    """

    def __init__(self) -> None:
        self._floats = torch.empty(_SCRATCH_ELEMENTS)

    def reserve(self, num_elements: int) -> None:
        """Makes room for `num_elements`."""
        if num_elements > self._floats.numel():
            self._floats = torch.empty(num_elements)

    def view(self, rows: int, columns: int) -> Tensor:
        """FP32 [rows, columns] of undefined content, valid until the next call."""
        return self._floats[: rows * columns].view(rows, columns)


class Matrix:
    """One or several stacked matrices, seen as a single one of [rows, columns].

    `weight` is [..., N, K] in BF16, FP32 or FP8 E4M3, or [..., N, K/2] bytes of two codes. `scale`
    is [..., ceil(N/128), ceil(K/128)] for FP8, [..., N, K/group] for INT4 (BF16 or FP32, with
    `zeros` of the same shape where codes are asymmetric) and for MXFP4 (bytes). Leading dimensions
    are stacked along the rows.
    """

    def __init__(
        self, weight: Tensor, scale: Tensor | None, scratch: Scratch, zeros: Tensor | None = None
    ) -> None:
        self._source = rows_of(weight, scale, zeros)
        self.rows, self.columns = self._source.count, self._source.columns
        self._scratch = scratch
        fitting = _SCRATCH_ELEMENTS // self.columns // _ROW_STEP * _ROW_STEP
        self._chunk_rows = min(max(fitting, _ROW_STEP), self._source.period)
        scratch.reserve(self._chunk_rows * self.columns)

    def matmul(self, x: Tensor) -> Tensor:
        """x times the transposed matrix: FP32 [T, columns] -> FP32 [T, rows].

        The caller rounds x to BF16 first, once for all matrices that it meets.
        """
        if self._chunk_rows == self.rows:
            return torch.mm(x, self.expand(0, self.rows).t())
        out = x.new_empty(x.shape[0], self.rows)
        for start, stop in self._chunks():
            torch.mm(x, self.expand(start, stop).t(), out=out[:, start:stop])
        return out

    def reserve_rows(self, num_rows: int) -> None:
        """Allows `expand` of up to `num_rows` rows at once; without it, 128 are certain to fit."""
        # A range that does not start at a block takes the head of its first block along.
        self._scratch.reserve((num_rows + self._source.block) * self.columns)

    def expand(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as FP32, in the scratch: valid until the next use of any matrix.

        The rows must belong to one of the stacked matrices where these are handled one by one.
        """
        source = self._source
        if isinstance(source, PlainRows) and source.weight.dtype == torch.float32:
            return source.weight[start:stop]
        lead = start % source.period % source.block
        rows = self._scratch.view(stop - start + lead, self.columns)
        source.expand(start - lead, rows)
        return rows[lead:]

    def _chunks(self) -> Iterator[tuple[int, int]]:
        period = self._source.period
        for base in range(0, self.rows, period):
            for start in range(0, period, self._chunk_rows):
                yield base + start, base + min(start + self._chunk_rows, period)
