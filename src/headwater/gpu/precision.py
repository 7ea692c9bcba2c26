"""What activations are rounded to between products on a GPU: FP16.

It has 11 significant bits where BF16, which the CPU's kernels multiply, has 8, and is multiplied
as fast: a rounding loses an eighth of a CPU's (see ARCHITECTURE.md). What FP16 lacks is range.
Norms and attention stay far within it; what a gated network has between its products need not, and
is brought nearer to zero by ACTIVATED_SCALE, after which 4.2 million is the greatest magnitude and
2e-6 is lost of the least. The cache is FP16, too, as decode on a CPU reads it. Tests of how work is
shared out set all three types to FP32, so that a different order of sums is all that is left.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headwater.kv.pages import ENTRY_DTYPE, as_entries

ROUNDED = torch.float16
IN_ATTENTION = torch.float16
CACHED = ENTRY_DTYPE

ACTIVATED_SCALE = 2.0**-6
GREATEST = torch.finfo(torch.float16).max


def rounded(x: Tensor) -> Tensor:
    """What the next product gets of x."""
    return x.to(ROUNDED)


def activated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up * ACTIVATED_SCALE as the next product gets it; `gate` and `up` are FP32."""
    return rounded(brought_near(functional.silu(gate).mul_(up)))


def brought_near(product: Tensor) -> Tensor:
    """FP32 silu(gate) * up, in place: times ACTIVATED_SCALE, and within FP16's range."""
    return product.mul_(ACTIVATED_SCALE).clamp_(-GREATEST, GREATEST)


def for_attention(x: Tensor) -> Tensor:
    """Queries, keys or values as attention gets them."""
    return x.to(IN_ATTENTION)


def for_cache(x: Tensor) -> Tensor:
    """Keys, values or latents as the cache keeps them."""
    return as_entries(x, CACHED)
