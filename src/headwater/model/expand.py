"""Weights as they lie in the segment, expanded exactly to FP32, a range of rows at a time.

Owns the arithmetic of every format; linear.py decides which rows and where to. All constructors
take [..., N, K] weights whose leading dimensions are stacked along the rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headwater.model.layer_spec import FP8_BLOCK

# A code whose fields are moved to their places in an FP32 word has its value times a power of two.
_E4M3_UNBIAS = 2.0**120
_E2M1_UNBIAS = 2.0**126


class Rows(Protocol):
    """The rows of one or several stacked matrices.

    `count` rows of `columns`; ranges to expand start at a multiple of `block` within a run of
    `period` rows, and do not cross from one run into the next.
    """

    count: int
    columns: int
    period: int
    block: int

    def expand(self, start: int, out: Tensor) -> None:
        """Writes rows [start, start + out.shape[0]) into FP32 `out`."""
        ...


def rows_of(weight: Tensor, scale: Tensor | None, zeros: Tensor | None) -> Rows:
    """The rows of a weight in whatever format its tensors are: see TensorSpecs' dtypes."""
    if weight.dtype == torch.uint8:
        assert scale is not None, "4-bit codes need scales"
        if scale.dtype == torch.uint8:
            return Mxfp4Rows(weight, scale)
        return Int4Rows(weight, scale, zeros)
    if weight.dtype == torch.float8_e4m3fn:
        assert scale is not None, "FP8 needs scales"
        return Fp8Rows(weight, scale)
    assert scale is None, f"{weight.dtype} has no scales"
    return PlainRows(weight)


class PlainRows:
    """BF16 or FP32."""

    block = 1

    def __init__(self, weight: Tensor) -> None:
        self.columns = weight.shape[-1]
        self.weight = weight.view(-1, self.columns)
        self.count = self.period = self.weight.shape[0]

    def expand(self, start: int, out: Tensor) -> None:
        """See Rows."""
        out.copy_(self.weight[start : start + out.shape[0]])


class Fp8Rows:
    """E4M3 times one scale per 128 x 128 block; NaN codes are not honoured, they read as 480."""

    block = FP8_BLOCK

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        num_rows, self.columns = weight.shape[-2:]
        self._bytes = weight.view(-1, self.columns).view(torch.int8)
        self.count = self._bytes.shape[0]
        # Where the scale blocks of stacked matrices do not line up, they are handled one by one.
        self.period = num_rows if num_rows % FP8_BLOCK else self.count
        self._scale = scale.reshape(-1, scale.shape[-1]).float()
        self._scale_rows = -(-self.period // FP8_BLOCK)

    def expand(self, start: int, out: Tensor) -> None:
        """See Rows."""
        bits = out.view(torch.int32).copy_(self._bytes[start : start + out.shape[0]])
        # seee emmm, sign-extended, to an FP32 word: sign at bit 31, exponent from bit 23 on.
        bits.bitwise_left_shift_(20).bitwise_and_(~0x78000000)
        out.mul_(_E4M3_UNBIAS)
        member, start_in = divmod(start, self.period)
        _scale_blocks(out, self._scale[member * self._scale_rows + start_in // FP8_BLOCK :])


class Int4Rows:
    """(code - zero point) times one scale per group of columns; without zero points, code - 8."""

    block = 1

    def __init__(self, weight: Tensor, scale: Tensor, zeros: Tensor | None) -> None:
        self.columns = 2 * weight.shape[-1]
        self._codes = weight.view(-1, weight.shape[-1])
        self.count = self.period = self._codes.shape[0]
        self._scale = scale.view(self.count, -1, 1)
        self._zeros = None if zeros is None else zeros.view(self.count, -1, 1)

    def expand(self, start: int, out: Tensor) -> None:
        """See Rows."""
        chosen = slice(start, start + out.shape[0])
        codes = self._codes[chosen]
        pairs = out.view(out.shape[0], -1, 2)
        pairs[..., 0].copy_(codes & 0xF)
        pairs[..., 1].copy_(codes >> 4)
        groups = out.view(out.shape[0], self._scale.shape[1], -1)
        groups.sub_(8.0 if self._zeros is None else self._zeros[chosen].float())
        groups.mul_(self._scale[chosen].float())


class Mxfp4Rows:
    """E2M1 times the power of two that an E8M0 byte stands for, per group of columns."""

    block = 1

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.columns = 2 * weight.shape[-1]
        self._codes = weight.view(-1, weight.shape[-1])
        self.count = self.period = self._codes.shape[0]
        self._scale = scale.view(self.count, -1, 1)

    def expand(self, start: int, out: Tensor) -> None:
        """See Rows."""
        chosen = slice(start, start + out.shape[0])
        codes = self._codes[chosen]
        bits = out.view(torch.int32).view(out.shape[0], -1, 2)
        # Shifts of int8 keep the sign.
        bits[..., 0].copy_((codes << 4).view(torch.int8) >> 4)
        bits[..., 1].copy_(codes.view(torch.int8) >> 4)
        # seem, sign-extended, to an FP32 word: sign at bit 31, exponent from bit 23 on.
        bits.bitwise_left_shift_(22).bitwise_and_(~0x7E000000)
        groups = out.view(out.shape[0], self._scale.shape[1], -1)
        groups.mul_(_E2M1_UNBIAS).mul_(power_of_byte(self._scale[chosen]))


def power_of_byte(exponents: Tensor) -> Tensor:
    """E8M0 bytes as FP32: 2^(byte - 127); 255, which is NaN, is refused when weights are loaded."""
    bits = exponents.int()
    # 2^-127 is subnormal: no exponent, and the highest bit of the fraction.
    return ((bits << 23) + (bits == 0).int() * (1 << 22)).view(torch.float32)


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
