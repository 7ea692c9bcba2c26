"""What activations are rounded to between products.

BF16 is the policy of the whole product (see ARCHITECTURE.md); attention's FP16 has three bits more,
in a range that queries, keys and values never leave. Tests of how work is shared out set both to
FP32, so that a different order of sums is all that is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDED = torch.bfloat16
IN_ATTENTION = torch.float16


def rounded(x: Tensor) -> Tensor:
    """What the next product gets of FP32 x."""
    return x.to(ROUNDED)


def for_attention(x: Tensor) -> Tensor:
    """Queries, keys or values as attention gets them."""
    return x.to(IN_ATTENTION)
