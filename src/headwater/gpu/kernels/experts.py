"""What the expert kernels work on: stacks of experts as they lie, rows of tokens, and tiles.

Owns the shapes and their checks, and how rows sorted by expert are cut into tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from headwater.errors import ConfigError
from headwater.gpu import precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

Format = Literal["fp16", "bf16", "fp8", "int4", "mxfp4"]

FP8_BLOCK = 128
_UNSHARDED_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of several experts in one format, cut into shards.

    `values` is [experts, shards, matrices, N, K] (bytes of two codes: K / 2), contiguous, likewise
    `scale` [..., ceil(N/128), ceil(K/128)] for FP8 and [..., N, K/group] for four bits, and `zero`.
    """

    values: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None

    @property
    def format(self) -> Format:
        """How the values are coded."""
        if self.values.dtype == torch.float8_e4m3fn:
            return "fp8"
        if self.values.dtype != torch.uint8:
            return "fp16" if self.values.dtype == torch.float16 else "bf16"
        assert self.scale is not None
        return "mxfp4" if self.scale.dtype == torch.uint8 else "int4"

    @property
    def num_shards(self) -> int:
        """Parts along the intermediate dimension."""
        return self.values.shape[1]

    @property
    def rows(self) -> int:
        """Rows of one matrix of one shard."""
        return self.values.shape[3]

    @property
    def columns(self) -> int:
        """Columns of one matrix of one shard."""
        return self.values.shape[4] * (2 if self.values.dtype == torch.uint8 else 1)

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 without scales."""
        if self.scale is None:
            return 0
        return FP8_BLOCK if self.format == "fp8" else self.columns // self.scale.shape[-1]


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The experts of one ring slot: gate and up [.., 2, I, H], and down [.., 1, H, I]."""

    gate_up: Stack
    down: Stack

    @property
    def is_fp8(self) -> bool:
        """Whether all of it is E4M3, which activations in E4M3 can be multiplied with."""
        return self.gate_up.format == self.down.format == "fp8"

    @classmethod
    def of(cls, parts: dict[str, Tensor]) -> ExpertStack:
        """From tensors named as in the weights segment: gate_up, gate_up.scale, down, ...

        Raises ConfigError when a part's format is not known.
        """
        return cls(_stack(parts, "gate_up"), _stack(parts, "down"))


def _stack(parts: dict[str, Tensor], name: str) -> Stack:
    values = parts[name]
    known = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    if values.dtype not in known:
        raise ConfigError(f"experts.{name}: {values.dtype} cannot be computed on a GPU")
    pieces = [values, parts.get(f"{name}.scale"), parts.get(f"{name}.zero")]
    return Stack(*(None if p is None else _five_dimensions(p, name) for p in pieces))  # type: ignore[arg-type]


def _five_dimensions(part: Tensor, name: str) -> Tensor:
    """gate_up is [E, 2, I, H] or [E, S, 2, I, H]; down [E, H, I] or [E, S, H, I]."""
    if name == "gate_up":
        return part.unsqueeze(1) if part.dim() == _UNSHARDED_DIMENSIONS else part
    shards = part if part.dim() == _UNSHARDED_DIMENSIONS else part.unsqueeze(1)
    return shards.unsqueeze(2)


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations [R, C] in FP16, or in E4M3 with FP32 `scale` [R, scales].

    Columns share a scale in blocks of 128, counted anew from the beginning of each shard. `index`,
    INT32 [rows], says which of the R rows each row to be computed reads; None: the row itself.
    """

    values: Tensor
    scale: Tensor | None = None
    index: Tensor | None = None


def empty_activations(
    num_rows: int, stack: ExpertStack, device: torch.device, *, is_quantized: bool
) -> Rows:
    """Room for what comes between gate_up and down."""
    shards, size = stack.gate_up.num_shards, stack.gate_up.rows
    dtype = torch.float8_e4m3fn if is_quantized else precision.ROUNDED
    values = torch.empty(num_rows, shards * size, dtype=dtype, device=device)
    if not is_quantized:
        return Rows(values)
    blocks = shards * -(-size // FP8_BLOCK)
    return Rows(values, torch.empty(num_rows, blocks, device=device))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which rows meet which expert: INT32 [3, tiles] of expert, first row and end of rows.

    Experts count within the stack, rows in the order sorted by expert; the outputs of the row
    `first_row` go to the first row of the buffer. `tile_rows` is the greatest height.
    """

    table: Tensor
    first_row: int
    num_rows: int
    tile_rows: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some experts' rows that are computed at once: rows [first_row, end_row) of the sorted ones.

    `group` is the ring slot's place in the layer; tiles [first_tile, end_tile) of the layer's.
    """

    group: int
    first_row: int
    end_row: int
    first_tile: int
    end_tile: int


def cut_into_tiles(
    counts: Sequence[int], group_sizes: Sequence[int], tile_rows: int, max_rows: int
) -> tuple[NDArray[np.int32], list[Piece]]:
    """Tiles [3, n] and pieces of a layer whose experts have `counts` rows, in order.

    Experts come in groups of `group_sizes`, one per ring slot; a piece never crosses a group and
    has at most `max_rows` rows, a multiple of `tile_rows`. Groups without rows have no piece.
    """
    assert max_rows % tile_rows == 0, "pieces end at whole tiles"
    tiles: list[tuple[int, int, int]] = []
    pieces: list[Piece] = []
    row = expert = 0
    for group, size in enumerate(group_sizes):
        first_row, first_tile = row, len(tiles)
        for local in range(size):
            stop = row + counts[expert]
            expert += 1
            while row < stop:
                end = min(row + tile_rows, stop, first_row + max_rows)
                tiles.append((local, row, end))
                row = end
                if row - first_row == max_rows:
                    pieces.append(Piece(group, first_row, row, first_tile, len(tiles)))
                    first_row, first_tile = row, len(tiles)
        if row > first_row:
            pieces.append(Piece(group, first_row, row, first_tile, len(tiles)))
    return np.array(tiles, dtype=np.int32).reshape(-1, 3).T.copy(), pieces
