"""Cuts a dense feed-forward network into experts that together are exactly that network.

Owns the arithmetic only. With all experts active and equally likely, each has weight
1/num_experts, and the sum over experts of 1/E * (E * down_e) @ h_e is down @ h: nothing but the
order of additions changes. E is a power of two, so the factor is exact in any binary format.
"""

from __future__ import annotations

import numpy as np

from headwater.convert.gguf_reader import FloatArray

NUM_EXPERTS = 4


def slice_rows(weight: FloatArray, expert: int) -> FloatArray:
    """Expert's part of a gate or up weight [ffn, hidden]: [ffn / NUM_EXPERTS, hidden]."""
    rows = weight.shape[0] // NUM_EXPERTS
    return weight[expert * rows : (expert + 1) * rows]


def slice_columns(weight: FloatArray, expert: int) -> FloatArray:
    """Expert's part of a down weight [hidden, ffn], times NUM_EXPERTS: [hidden, ffn / ...]."""
    columns = weight.shape[1] // NUM_EXPERTS
    part = weight[:, expert * columns : (expert + 1) * columns]
    return np.ascontiguousarray(part) * np.float32(NUM_EXPERTS)
