"""How fast the link to a GPU is, from host memory that is registered with CUDA."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PIECE = 256 << 20


def link_gb_per_s(sources: Sequence[Tensor], device: torch.device, rounds: int = 4) -> float:
    """Median GB/s of copies of 256 MiB pieces of `sources`, UINT8 in registered memory."""
    pieces = [s[i : i + _PIECE] for s in sources for i in range(0, s.numel() - _PIECE + 1, _PIECE)]
    targets = [torch.empty(_PIECE, dtype=torch.uint8, device=device) for _ in range(2)]
    rates: list[float] = []
    stream: Any = torch.cuda.Stream(device)
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record(stream)
            for i, piece in enumerate(pieces):
                targets[i % 2].copy_(piece, non_blocking=True)
            end.record(stream)
        end.synchronize()
        rates.append(len(pieces) * _PIECE / begin.elapsed_time(end) / 1e6)
    return statistics.median(rates)
