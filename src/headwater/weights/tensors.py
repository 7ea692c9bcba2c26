"""How tensors are named, shaped and laid out: the contract between checkpoints and the model.

A model family lists its tensors as TensorSpecs; the loader finds each part in the checkpoint and
places it, byte for byte wherever the formats allow, into the weights segment; the model reads
TensorEntries back.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class DType(enum.Enum):
    """Element type; the value is its name in safetensors files.

    U8 holds bytes whose meaning the tensor's use decides: two 4-bit codes, the column with the even
    number in the low half; a zero point; or an E8M0 scale, 2^(byte - 127).
    """

    F32 = "F32"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    U8 = "U8"

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}[self.value]


class Encoding(enum.Enum):
    """How a checkpoint may store a tensor other than as it lies in the segment.

    Below, [N, K] is the linear weight in question and g its columns per scale; see decode.py.
    """

    WORDS = "the bytes of U8 [..., N, K/2], seen as int32 [..., N, K/8]"
    ROW_PACKED_ZEROS = "zero points, int32 [ceil(N/8), K/g], eight rows a word"
    AWQ_CODES = "codes, int32 [K, N/8], eight columns a word in AWQ's order"
    AWQ_ZEROS = "zero points, int32 [K/g, N/8], eight columns a word in AWQ's order"
    GPTQ_CODES = "codes, int32 [K/8, N], eight rows a word"
    GPTQ_ZEROS = "zero points less one, int32 [K/g, N/8], eight columns a word"
    GPTQ_V2_ZEROS = "zero points, int32 [K/g, N/8], eight columns a word"
    TRANSPOSED_BF16 = "BF16 [K/g, N]"
    TRANSPOSED_F16 = "FP16 [K/g, N], which becomes FP32"
    F16_TO_F32 = "FP16, which becomes FP32"
    F16_TO_BF16 = "FP16, which is rounded to BF16"


@dataclass(frozen=True, slots=True)
class Cut:
    """The place of a part inside a larger source of `shape` [rows, columns]."""

    shape: tuple[int, int]
    first_row: int
    first_column: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor and its place inside the tensor that it helps to fill.

    `index` fixes the leading dimensions of the target: with a target of shape [E, 2, I, H] and
    index (7, 0), the source has shape [I, H] and fills target[7, 0]; with a `cut` it is larger, and
    a rectangle of it fills the target.
    """

    source: str
    index: tuple[int, ...] = ()
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor the model needs: name in the segment, shape, allowed dtypes, and its sources.

    All parts of one tensor are stored alike: as one of `dtypes`, or in one of `encodings`.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[DType, ...]
    parts: tuple[TensorPart, ...]
    encodings: tuple[Encoding, ...] = ()


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
