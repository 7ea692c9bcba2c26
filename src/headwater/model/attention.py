"""Causal softmax attention over one sequence, with bounded memory for the scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 64 MiB of FP32 scores at a time.
MAX_SCORES = 1 << 24


def causal_chunks(num_queries: int, start: int, num_heads: int) -> Iterator[tuple[int, int, int]]:
    """Splits queries at positions start, start + 1, ... so that scores stay below MAX_SCORES.

    Yields (first query, end of queries, number of keys that the last of them may see).
    """
    chunk = max(1, MAX_SCORES // (num_heads * (start + num_queries)))
    for first in range(0, num_queries, chunk):
        stop = min(first + chunk, num_queries)
        yield first, stop, start + stop


def causal_softmax(scores: Tensor, num_queries: int) -> Tensor:
    """Softmax, in place, over the last dimension of [heads, num_queries, keys].

    The last query sees all keys, the one before all but one, and so on.
    """
    if num_queries > 1:
        num_keys = scores.shape[-1]
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(
            num_keys - num_queries + 1
        )
        scores.masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1, out=scores)
