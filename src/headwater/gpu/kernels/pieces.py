"""What several kernels of a decode step begin with (Triton): sums of pieces, and the norm."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

import triton
import triton.language as tl

from headwater.gpu.precision import GREATEST

_GREATEST = tl.constexpr(GREATEST)


@triton.jit
def rms_norm(x, scale, eps, width: tl.constexpr):
    """FP32 x, zero beyond `width`, over its root mean square, times a scale."""
    square = tl.sum(x * x, axis=0) / width
    return x * tl.rsqrt(square + eps) * scale


@triton.jit
def sum_of_pieces(partial, row, rows_in_all, first, width, column, mask, pieces: tl.constexpr):
    """The sum of the pieces [pieces, rows, width] that make up columns of a row."""
    place = row * width + first + column
    total = tl.load(partial + place, mask=mask, other=0.0)
    for piece in tl.static_range(1, pieces):
        total += tl.load(partial + piece * rows_in_all * width + place, mask=mask, other=0.0)
    return total


@triton.jit
def within_half(x):
    """What lies beyond the range of FP16 becomes its end; NaN stays."""
    return tl.clamp(x, -_GREATEST, _GREATEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def as_entry(x, cache):
    """Keys, values or latents as the cache keeps them; see headwater.kv.pages.as_entries."""
    return within_half(x).to(cache.dtype.element_ty)


@triton.jit
def in_two(x, product: tl.constexpr):
    """FP32 as the sum of two of the type `product`.

    With BF16 at most 2^-17 of it is lost; with FP16 2^-23, or 2^-25 where that is more.
    """
    high = x.to(product)
    return high, (x - high.to(tl.float32)).to(product)
