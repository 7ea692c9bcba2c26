"""Tile sizes of the grouped products per card.

Owns which tile a card uses; grouped.py owns what a tile is: `block_n` weight rows by so many tokens
as the key says. `warps` and `stages` are Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.gpu.memory_plan import EXPANDED_ABOVE


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One kernel's shape."""

    block_n: int
    warps: int
    stages: int


HEIGHTS = (16, 32, 64, 128)
"""Tokens per tile."""
MOST_QUANTIZED = 64
"""Tokens per tile of activations in E4M3."""
EXPANDED_FROM = next(height for height in HEIGHTS if height > EXPANDED_ABOVE)
"""Tiles so high multiply weights that were expanded to FP16 before; see expansion.py."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """For tiles of some height: gate and up together, and down for FP16 and for E4M3 activations.

    The first has two weight tiles and two sums at once; where activations may be E4M3 its block_n
    must be the width of their scale block.
    """

    gated: TileConfig
    down: TileConfig
    down_quantized: TileConfig | None


# sm_90: measured on an H200 at DeepSeek-V3's shapes (benchmarks/results/gpu_products.json). sm_86,
# sm_89 and sm_120 have 99 KiB of shared memory per block and no warpgroup products: derived from
# those sizes, not measured.
_SMALL = {
    16: Shapes(TileConfig(128, 8, 2), TileConfig(128, 4, 3), TileConfig(128, 4, 3)),
    32: Shapes(TileConfig(128, 8, 2), TileConfig(128, 4, 3), TileConfig(128, 4, 3)),
    64: Shapes(TileConfig(128, 8, 1), TileConfig(128, 8, 2), TileConfig(128, 4, 2)),
    128: Shapes(TileConfig(64, 8, 2), TileConfig(128, 8, 2), None),
}
_LARGE = {
    16: Shapes(TileConfig(128, 8, 4), TileConfig(128, 4, 4), TileConfig(128, 4, 4)),
    32: Shapes(TileConfig(128, 4, 4), TileConfig(128, 4, 4), TileConfig(128, 4, 4)),
    64: Shapes(TileConfig(128, 8, 3), TileConfig(128, 8, 3), TileConfig(128, 4, 3)),
    128: Shapes(TileConfig(128, 8, 4), TileConfig(128, 8, 3), None),
}
_TABLE = {(8, 6): _SMALL, (8, 9): _SMALL, (9, 0): _LARGE, (12, 0): _SMALL}


def tile_rows(mean_rows: float, *, is_quantized: bool) -> int:
    """The height of tiles for experts that have so many rows on average."""
    found = next((height for height in HEIGHTS if height >= mean_rows), HEIGHTS[-1])
    return min(found, MOST_QUANTIZED) if is_quantized else found


def shapes_for(height: int, capability: tuple[int, int]) -> Shapes:
    """The kernels' shapes for tiles of `height` tokens; unknown cards get small tiles."""
    return _TABLE.get(capability, _SMALL)[height]


def capability_of(device: torch.device) -> tuple[int, int]:
    """A CUDA device's compute capability; elsewhere (the interpreter) that of an sm_86."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 6)
