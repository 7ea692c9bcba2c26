"""Names for full blocks of tokens: equal names mean equal tokens, and equal tokens before them.

Both sides compute them: the router for a prompt, decode for what it generates.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# 128 bits: a collision, which would give one request another's context, stays out of reach.
HASH_BYTES = 16


def chain(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block that follows the block named `previous`; b"" for the first one."""
    data = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(previous + data, digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """The names of all full blocks of a sequence, oldest first."""
    names: list[bytes] = []
    previous = b""
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        previous = chain(previous, token_ids[start : start + block_tokens])
        names.append(previous)
    return tuple(names)
