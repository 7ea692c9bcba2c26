"""Where tokens stand, as rotary angles on the device; made once per batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.model.rope import RotaryTable, rope_frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.model.layer_spec import RopeSpec


class Positions:
    """The angles of int64 `positions` [n], per kind of rotary embedding."""

    def __init__(
        self, positions: Tensor, tables: dict[RopeSpec, RotaryTable], device: torch.device
    ) -> None:
        self._positions = positions.to(device).float()
        self._tables = tables
        self._angles: dict[RopeSpec, tuple[Tensor, Tensor]] = {}

    def table(self, spec: RopeSpec) -> RotaryTable:
        """What rotates by the angles."""
        if spec not in self._tables:
            self._tables[spec] = RotaryTable(spec)
        return self._tables[spec]

    def angles(self, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        """Cosines and sines, FP32 [n, 1, dim / 2]; see RotaryTable.rows."""
        if spec not in self._angles:
            frequencies = rope_frequencies(spec).to(self._positions.device)
            angles = self._positions[:, None, None] * frequencies
            self._angles[spec] = angles.cos() * spec.amplitude, angles.sin() * spec.amplitude
        return self._angles[spec]
