"""Matrices as they lie in the weights segment, and products with them.

Owns the numeric policy of every linear operation: the weight's values are used exactly (BF16, or
FP8 times its block scale), the input has been rounded to BF16, and products are accumulated and
returned in FP32. As torch has no such product on a CPU, weights are expanded to FP32 a few rows at
a time into one small scratch that stays in the cache; a weight is never copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headwater.model.layer_spec import FP8_BLOCK

# 2 MiB of FP32: fits the L2 caches of two cores, and is large enough to keep both busy (measured:
# lm_head of the default model takes 4.9 ms at one token, 8.5 ms with half of it).
_SCRATCH_ELEMENTS = 1 << 19
# An E4M3 byte whose fields are moved to their places in an FP32 word has its value times 2^-120.
_E4M3_UNBIAS = 2.0**120


def round_to_bf16(x: Tensor) -> Tensor:
    """FP32 values rounded to the nearest BF16, still as FP32: what Matrix.matmul expects."""
    return x.bfloat16().float()


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

    `weight` is [..., N, K] in BF16, FP32 or FP8 E4M3; `scale`, for FP8 only, is
    [..., ceil(N/128), ceil(K/128)]. Leading dimensions are stacked along the rows. NaN codes of
    E4M3 are not honoured: they read as 480.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None, scratch: Scratch) -> None:
        num_rows, self.columns = weight.shape[-2:]
        self.rows = weight.numel() // self.columns
        is_fp8 = weight.dtype == torch.float8_e4m3fn
        assert is_fp8 == (scale is not None)
        # Where the scale blocks of stacked matrices do not line up, they are handled one by one.
        self._period = num_rows if is_fp8 and num_rows % FP8_BLOCK else self.rows
        flat = weight.view(self.rows, self.columns)
        self._weight = flat.view(torch.int8) if is_fp8 else flat
        self._scale = None if scale is None else scale.reshape(-1, scale.shape[-1]).float()
        self._scale_rows = -(-self._period // FP8_BLOCK)
        self._scratch = scratch
        fitting = _SCRATCH_ELEMENTS // self.columns // FP8_BLOCK * FP8_BLOCK
        self._chunk_rows = min(max(fitting, FP8_BLOCK), self._period)
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
        self._scratch.reserve((num_rows + FP8_BLOCK) * self.columns)

    def expand(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as FP32, in the scratch: valid until the next use of any matrix.

        The rows must belong to one of the stacked matrices where these are handled one by one.
        """
        if self._scale is None:
            if self._weight.dtype == torch.float32:
                return self._weight[start:stop]
            return self._scratch.view(stop - start, self.columns).copy_(self._weight[start:stop])
        member, start_in = divmod(start, self._period)
        lead = start_in % FP8_BLOCK
        rows = self._scratch.view(stop - start + lead, self.columns)
        bits = rows.view(torch.int32).copy_(self._weight[start - lead : stop])
        # seee emmm, sign-extended, to an FP32 word: sign at bit 31, exponent from bit 23 on.
        bits.bitwise_left_shift_(20).bitwise_and_(~0x78000000)
        rows.mul_(_E4M3_UNBIAS)
        first_block = member * self._scale_rows + start_in // FP8_BLOCK
        _scale_blocks(rows, self._scale[first_block:])
        return rows[lead:]

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for base in range(0, self.rows, self._period):
            for start in range(0, self._period, self._chunk_rows):
                yield base + start, base + min(start + self._chunk_rows, self._period)


def _scale_blocks(rows: Tensor, scale: Tensor) -> None:
    """Multiplies each 128 x 128 block of `rows`, ragged at the end, by its element of `scale`."""
    num_rows, num_columns = rows.shape
    full_rows, full_columns = num_rows // FP8_BLOCK, num_columns // FP8_BLOCK
    for row_range, row_blocks, row_scales in (
        (slice(0, full_rows * FP8_BLOCK), full_rows, slice(0, full_rows)),
        (slice(full_rows * FP8_BLOCK, num_rows), 1, slice(full_rows, full_rows + 1)),
    ):
        if row_range.start == row_range.stop:
            continue
        part = rows[row_range].view(row_blocks, -1, num_columns)
        factors = scale[row_scales, None, :, None]
        if full_columns:
            blocks = part[..., : full_columns * FP8_BLOCK].view(
                row_blocks, -1, full_columns, FP8_BLOCK
            )
            blocks.mul_(factors[:, :, :full_columns])
        if num_columns % FP8_BLOCK:
            part[..., full_columns * FP8_BLOCK :].mul_(factors[:, :, full_columns])
