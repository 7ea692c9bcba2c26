"""Compiles the kernels that a model's sweeps will need, before there is a prompt.

Triton compiles a variant at its first launch, which takes seconds; later starts find it on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.gpu import kernels
from headwater.gpu.kernels.experts import ExpertStack, Rows, Tiles, empty_activations
from headwater.gpu.kernels.table import EXPANDED_FROM, HEIGHTS, MOST_QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headwater.gpu.layout import ExpertGroup


def warm_up(
    groups: Iterable[ExpertGroup],
    hidden: int,
    choices: int,
    device: torch.device,
    *,
    is_quantized: bool,
) -> None:
    """Runs every kernel once on one row, for each way in which `groups` are stored.

    `is_quantized` says whether activations may also be E4M3.
    """
    seen = set()
    for group in groups:
        kind = tuple((view.name, view.dtype, view.shape[1:]) for view in group.views)
        if kind in seen:
            continue
        seen.add(kind)
        parts = {
            name: torch.zeros(1, *shape, dtype=dtype, device=device) for name, dtype, shape in kind
        }
        stack = ExpertStack.of(parts)
        for quantized in (False, True) if is_quantized and stack.is_fp8 else (False,):
            for height in HEIGHTS:
                if height <= MOST_QUANTIZED or not quantized:
                    _run(stack, hidden, choices, height, device, is_quantized=quantized)


def _run(
    stack: ExpertStack,
    hidden: int,
    choices: int,
    height: int,
    device: torch.device,
    *,
    is_quantized: bool,
) -> None:
    if height >= EXPANDED_FROM:
        stack = kernels.expand(stack)
    x = torch.zeros(1, hidden, dtype=torch.float16, device=device)
    values, scale = kernels.quantize(x) if is_quantized else (x, None)
    tiles = Tiles(torch.tensor([[0], [0], [1]], dtype=torch.int32, device=device), 0, 1, height)
    rows = Rows(values, scale, torch.zeros(1, dtype=torch.int32, device=device))
    activated = empty_activations(1, stack, device, is_quantized=is_quantized)
    kernels.gate_up(rows, stack, tiles, activated)
    outputs = torch.zeros(1, hidden, device=device)
    kernels.down(activated, stack, tiles, outputs)
    places = torch.zeros(1, choices, dtype=torch.int32, device=device)
    weights = torch.zeros(1, choices, device=device)
    kernels.add_weighted(torch.zeros(1, hidden, device=device), outputs, places, weights, 0)
