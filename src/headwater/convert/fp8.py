"""Block-scaled FP8: e4m3 values with one float32 scale per 128x128 block.

Owns the rounding; `weight = value * scale`, the scale being named weight_scale_inv in files.
"""

from __future__ import annotations

import torch

BLOCK = 128

_MAX_E4M3 = 448.0


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a float32 [N, K] to (float8_e4m3fn [N, K], float32 [ceil(N/128), ceil(K/128)]).

    The largest magnitude of each block becomes 448; blocks at the edges may be smaller.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / _MAX_E4M3, torch.ones_like(largest))
    # Rounding the scale may lift a quotient over the largest value, which would become NaN.
    scaled = (blocks / scales[:, None, :, None]).clamp(-_MAX_E4M3, _MAX_E4M3)
    values = scaled.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return values.contiguous(), scales
