"""The two words of a lease slot: whose the slot is, and whose prompt is complete in it.

Each word has a number in its upper 40 bits, which grows with each lease, and in its lower 24 bits
a part of a CRC-32 (as zlib computes it) of what the word stands for: the lease's slot and blocks,
or the prompt's tokens. So a lease that was altered on its way is noticed before anybody writes
under it, and an answer to another prompt than the computed one before it begins.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHECK_BITS = 24
_CHECK_MASK = (1 << _CHECK_BITS) - 1


def lease_word(number: int, slot: int, block_ids: Sequence[int], cached_tokens: int) -> int:
    """The generation of a lease, `number` being at least 1."""
    return number << _CHECK_BITS | _check((slot, cached_tokens, *block_ids))


def ended_word(number: int) -> int:
    """What a slot has that belongs to nobody; no lease of another number has it."""
    return number << _CHECK_BITS


def number_of(word: int) -> int:
    """The number in a word."""
    return word >> _CHECK_BITS


def prompt_word(generation: int, token_ids: Sequence[int]) -> int:
    """What a slot says when these tokens are computed under the lease of that generation."""
    return number_of(generation) << _CHECK_BITS | _check(token_ids)


def forked_prompt_word(word: int, generation: int) -> int:
    """A prompt's word under another lease."""
    return number_of(generation) << _CHECK_BITS | word & _CHECK_MASK


def _check(values: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(values)}I", *values)) & _CHECK_MASK
