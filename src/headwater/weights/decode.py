"""Turns what a checkpoint stores into what lies in the segment, where the two differ.

Owns the shapes and bit orders of every Encoding; reads no file. All results are exact but for
F16_TO_BF16, which rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.weights.tensors import DType, Encoding

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_PER_WORD = 8
# Column 8w + i of a word w lies at this nibble of it in AWQ checkpoints.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_PLAIN_NIBBLES = tuple(range(_PER_WORD))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a checkpoint should hold it: its safetensors dtype, its shape, and what it
    becomes in the segment."""

    dtype: str
    shape: tuple[int, ...]
    target: DType


def stored_form(encoding: Encoding, shape: tuple[int, ...]) -> Stored:
    """How a target of `shape` is stored; matrix encodings take [rows, columns]."""
    if encoding is Encoding.WORDS:
        return Stored("I32", (*shape[:-1], shape[-1] // 4), DType.U8)
    if encoding is Encoding.F16_TO_F32:
        return Stored("F16", shape, DType.F32)
    if encoding is Encoding.F16_TO_BF16:
        return Stored("F16", shape, DType.BF16)
    rows, columns = shape
    words = -(-rows // _PER_WORD)
    if encoding is Encoding.ROW_PACKED_ZEROS:
        return Stored("I32", (words, columns), DType.U8)
    if encoding is Encoding.AWQ_CODES:
        return Stored("I32", (2 * columns, words), DType.U8)
    if encoding is Encoding.GPTQ_CODES:
        return Stored("I32", (2 * columns // _PER_WORD, rows), DType.U8)
    if encoding is Encoding.TRANSPOSED_BF16:
        return Stored("BF16", (columns, rows), DType.BF16)
    if encoding is Encoding.TRANSPOSED_F16:
        return Stored("F16", (columns, rows), DType.F32)
    return Stored("I32", (columns, words), DType.U8)


def is_row_wise(encoding: Encoding | None) -> bool:
    """Whether target rows need only the same rows of what is stored."""
    return encoding in (None, Encoding.WORDS, Encoding.F16_TO_F32, Encoding.F16_TO_BF16)


def decode_rows(encoding: Encoding | None, stored: Array, first: int, stop: int) -> Array:
    """Rows [first, stop) of the target, from all that is stored; None means that it lies alike.

    `stored` is [rows, columns]: int32 for words, float16, or uint16 where BF16 bits are meant.
    The result is contiguous, uint8, float32, or uint16 for BF16.
    """
    return np.ascontiguousarray(_DECODERS[encoding](stored, first, stop))


def _same(stored: Array, first: int, stop: int) -> Array:
    return stored[first:stop]


def _words(stored: Array, first: int, stop: int) -> Array:
    return stored[first:stop].view(np.uint8)


def _f16_to_f32(stored: Array, first: int, stop: int) -> Array:
    return stored[first:stop].astype(np.float32)


def _f16_to_bf16(stored: Array, first: int, stop: int) -> Array:
    bits = stored[first:stop].astype(np.float32).view(np.uint32)
    # To nearest, ties to even; no FP16 value overflows, and a NaN keeps its leading bits.
    rounded: Array = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def _row_packed_zeros(stored: Array, first: int, stop: int) -> Array:
    rows = np.arange(first, stop)
    shifts = (4 * (rows % _PER_WORD)).astype(np.uint32)
    nibbles: Array = (stored.view(np.uint32)[rows // _PER_WORD] >> shifts[:, None]) & 0xF
    return nibbles.astype(np.uint8)


def _column_packed(stored: Array, first: int, stop: int, order: tuple[int, ...]) -> Array:
    """[M, N/8] words -> uint8 [stop - first, M]: the nibbles of columns first to stop."""
    first_word, stop_word = first // _PER_WORD, -(-stop // _PER_WORD)
    words = np.ascontiguousarray(stored.view(np.uint32)[:, first_word:stop_word].T)
    nibbles = np.empty((words.shape[0], _PER_WORD, words.shape[1]), np.uint8)
    for column, nibble in enumerate(order):
        nibbles[:, column] = (words >> np.uint32(4 * nibble)) & 0xF
    rows = nibbles.reshape(-1, words.shape[1])
    return rows[first - first_word * _PER_WORD : stop - first_word * _PER_WORD]


def _awq_codes(stored: Array, first: int, stop: int) -> Array:
    codes = _column_packed(stored, first, stop, _AWQ_NIBBLES)
    packed: Array = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed


def _awq_zeros(stored: Array, first: int, stop: int) -> Array:
    return _column_packed(stored, first, stop, _AWQ_NIBBLES)


def _gptq_codes(stored: Array, first: int, stop: int) -> Array:
    return np.ascontiguousarray(stored[:, first:stop].T).view(np.uint8)


def _gptq_zeros(stored: Array, first: int, stop: int) -> Array:
    # A zero point of 0 is stored as -1, that is 15.
    zeros: Array = (_column_packed(stored, first, stop, _PLAIN_NIBBLES) + 1) & 0xF
    return zeros


def _gptq_v2_zeros(stored: Array, first: int, stop: int) -> Array:
    return _column_packed(stored, first, stop, _PLAIN_NIBBLES)


def _transposed(stored: Array, first: int, stop: int) -> Array:
    return stored[:, first:stop].T


def _transposed_f16(stored: Array, first: int, stop: int) -> Array:
    return stored[:, first:stop].T.astype(np.float32)


_DECODERS: dict[Encoding | None, Callable[[Array, int, int], Array]] = {
    None: _same,
    Encoding.WORDS: _words,
    Encoding.ROW_PACKED_ZEROS: _row_packed_zeros,
    Encoding.AWQ_CODES: _awq_codes,
    Encoding.AWQ_ZEROS: _awq_zeros,
    Encoding.GPTQ_CODES: _gptq_codes,
    Encoding.GPTQ_ZEROS: _gptq_zeros,
    Encoding.GPTQ_V2_ZEROS: _gptq_v2_zeros,
    Encoding.TRANSPOSED_BF16: _transposed,
    Encoding.TRANSPOSED_F16: _transposed_f16,
    Encoding.F16_TO_F32: _f16_to_f32,
    Encoding.F16_TO_BF16: _f16_to_bf16,
}
