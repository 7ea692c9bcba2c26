"""The C heap of the router process."""

from __future__ import annotations

import contextlib
import ctypes

# From glibc's malloc.h.
_M_ARENA_MAX = -8


def share_one_arena() -> None:
    """Lets all threads share one arena of glibc's malloc; does nothing with another C library.

    Text is tokenised in worker threads. With an arena each, what one frees is not found by the
    others, and the process grows with every request that it has served.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
