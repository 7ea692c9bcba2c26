"""Rotary position embedding: frequencies, tables of cosines and sines, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.model.layer_spec import RopeSpec

_FIRST_TABLE_TOKENS = 1024


def rope_frequencies(spec: RopeSpec) -> Tensor:
    """Angle per position of each pair of elements: FP32 [dim / 2], in radians."""
    powers = spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)
    plain = 1.0 / powers
    if spec.kind == "default":
        return plain
    stretched = 1.0 / (spec.factor * powers)
    if spec.kind == "linear":
        return stretched
    low = _pair_of_turns(spec, spec.beta_fast)
    high = _pair_of_turns(spec, spec.beta_slow)
    if spec.is_range_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001  # a step where both ends coincide
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * ramp + plain * (1 - ramp)


def _pair_of_turns(spec: RopeSpec, num_turns: float) -> float:
    """Index (of a pair, fractional) that turns `num_turns` times within the original context."""
    angle = spec.original_context_tokens / (num_turns * 2 * math.pi)
    return spec.dim * math.log(angle) / (2 * math.log(spec.theta))


class RotaryTable:
    """Cosines and sines of all positions seen so far; grows as sequences do."""

    def __init__(self, spec: RopeSpec) -> None:
        self._spec = spec
        self._frequencies = rope_frequencies(spec)
        self._grow(_FIRST_TABLE_TOKENS)

    def rows(self, positions: Tensor, max_position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 `positions` [T], none above `max_position`.

        Both are FP32 [T, 1, dim / 2], ready to multiply [T, heads, dim / 2].
        """
        while max_position >= self._cos.shape[0]:
            self._grow(2 * self._cos.shape[0])
        return self._cos[positions], self._sin[positions]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates FP32 x [T, heads, dim] by the angles that `rows` gave.

        The rotated pairs come out as (i, i + dim/2), also where they came in interleaved:
        dot products are the same, as queries and keys are permuted alike.
        """
        if self._spec.is_interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _grow(self, num_tokens: int) -> None:
        positions = torch.arange(num_tokens, dtype=torch.float32)
        angles = positions[:, None, None] * self._frequencies
        self._cos = angles.cos() * self._spec.amplitude
        self._sin = angles.sin() * self._spec.amplitude
