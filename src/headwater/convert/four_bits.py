"""INT4 and MXFP4: rounding to nearest, with the scale of each group that errs least.

Owns the arithmetic; names and files are linear_formats.py's. Both take FP32 rows [n, K].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwater.model.layer_spec import MXFP4_GROUP

# Shares of the range of codes that a group's largest magnitude may take: a smaller scale cuts it
# off and serves the other values better.
_INT4_RANGES = (1.0, 0.9, 0.8)
_INT4_MAX = 7.0
# 1.5 * 2^2, the largest E2M1 value.
_E2M1_MAX = 6.0
_E2M1_MAX_EXPONENT = 2
_E8M0_BIAS = 127
# Smaller scales are of no use to weights, and subnormal in FP32 soon.
_LOWEST_EXPONENT = -120


def quantize_int4(rows: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric: (bytes of two codes [n, K/2], BF16 scales [n, K/group], the values they mean)."""
    groups = rows.view(rows.shape[0], -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    candidates = []
    for share in _INT4_RANGES:
        scale = (largest * (share / _INT4_MAX)).bfloat16().float()
        candidates.append(torch.where(scale > 0, scale, 1.0))
    scale = _best(groups, candidates, lambda scale: _int4_codes(groups, scale).mul_(scale))
    codes = _int4_codes(groups, scale)
    packed = _packed((codes + 8).to(torch.uint8).flatten(1))
    return packed, scale.bfloat16().squeeze(-1), codes.mul_(scale).flatten(1)


def quantize_mxfp4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes of two codes [n, K/2], E8M0 scales uint8 [n, K/32], the values they mean)."""
    groups = rows.view(rows.shape[0], -1, MXFP4_GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    lowest = torch.frexp(largest).exponent - 1 - _E2M1_MAX_EXPONENT
    candidates = [
        torch.ldexp(
            torch.ones_like(largest), (lowest + step).clamp(_LOWEST_EXPONENT, -_LOWEST_EXPONENT)
        )
        for step in (0, 1)
    ]
    scale = _best(groups, candidates, lambda scale: _e2m1(groups, scale).mul_(scale))
    units = _e2m1(groups, scale)
    scales = (torch.frexp(scale).exponent - 1 + _E8M0_BIAS).to(torch.uint8).squeeze(-1)
    return _packed(_e2m1_codes(units).flatten(1)), scales, units.mul_(scale).flatten(1)


def _best(
    groups: Tensor, candidates: Sequence[Tensor], values_at: Callable[[Tensor], Tensor]
) -> Tensor:
    """Of the candidate scales [n, groups, 1], those whose values are nearest to `groups`."""
    best = candidates[0]
    least = torch.full_like(best, float("inf"))
    for scale in candidates:
        error = values_at(scale).sub_(groups).square_().sum(-1, keepdim=True)
        is_better = error < least
        best = torch.where(is_better, scale, best)
        least = torch.where(is_better, error, least)
    return best


def _int4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-_INT4_MAX - 1, _INT4_MAX)


def _e2m1(groups: Tensor, scale: Tensor) -> Tensor:
    """The nearest multiples of `scale`, a power of two, that E2M1 has; ties go to even codes."""
    units = groups / scale
    spacing = _leading_power(units).mul_(0.5)
    return units.div_(spacing).round_().mul_(spacing).clamp_(-_E2M1_MAX, _E2M1_MAX)


def _e2m1_codes(units: Tensor) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 -> 0 to 7; with 8 more where the sign is set."""
    power = _leading_power(units)
    exponents = (power.view(torch.int32) >> 23) - 127
    codes = (units.abs() * 2 / power).to(torch.uint8) + 2 * exponents.to(torch.uint8)
    return codes | (torch.signbit(units).to(torch.uint8) << 3)


def _leading_power(units: Tensor) -> Tensor:
    """Per magnitude the greatest power of two not above it, within 1 to 4."""
    bits = units.abs().clamp_(1.0, 4.0).view(torch.int32)
    return bits.bitwise_and_(0x7F800000).view(torch.float32)


def _packed(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
