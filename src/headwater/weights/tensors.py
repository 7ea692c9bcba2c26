"""How tensors are named, shaped and laid out: the contract between checkpoints and the model.

A model family lists its tensors as TensorSpecs; the loader finds each part in the checkpoint and
places it, byte for byte, into the weights segment; the model reads TensorEntries back.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class DType(enum.Enum):
    """Element type; the value is its name in safetensors files."""

    F32 = "F32"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return {"F32": 4, "BF16": 2, "F8_E4M3": 1}[self.value]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor and its place inside the tensor that it helps to fill.

    `index` fixes the leading dimensions of the target: with a target of shape [E, 2, I, H] and
    index (7, 0), the source has shape [I, H] and fills target[7, 0].
    """

    source: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor the model needs: name in the segment, shape, allowed dtypes, and its sources.

    All parts of one tensor have the same dtype, one of `dtypes`.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[DType, ...]
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as it lies in a segment; `offset` counts bytes from the start of the payload."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.item_bytes
