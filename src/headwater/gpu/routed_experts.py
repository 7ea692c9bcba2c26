"""The routed experts of a layer, while they stream by.

Owns the order: groups are taken as they come, all of them, and each one's rows go through gate, up
and down and back to their tokens before its slot is given back. Where an expert has many rows its
weights are expanded to FP16 once, instead of anew for every tile of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu import kernels
from headwater.gpu.kernels.experts import ExpertStack, Rows, empty_activations
from headwater.gpu.kernels.table import EXPANDED_FROM
from headwater.gpu.layout import view_parts

if TYPE_CHECKING:
    from headwater.gpu.layout import LayerLayout
    from headwater.gpu.routing import Routing
    from headwater.gpu.streamer import Streamer


def add_routed_experts(
    target: Tensor,
    x: Tensor,
    layer: LayerLayout,
    routing: Routing,
    streamer: Streamer,
    *,
    is_quantized: bool,
) -> None:
    """target[t] += the weighted outputs of token t's experts that this rank owns.

    `target` is FP32 and `x` FP16, both [T, hidden]. With `is_quantized` activations that meet FP8
    weights are rounded to E4M3; weights of other formats always meet FP16.
    """
    inputs: Rows | None = None
    pieces = iter(routing.pieces)
    piece = next(pieces, None)
    for number, group in enumerate(layer.groups):
        stack = ExpertStack.of(view_parts(streamer.take(group.key), group.views))
        is_fp8 = is_quantized and stack.is_fp8
        if inputs is None:
            values, scale = kernels.quantize(x) if is_fp8 else (x, None)
            inputs = Rows(values, scale, routing.index)
        has_rows = piece is not None and piece.group == number
        if has_rows and routing.tile_rows >= EXPANDED_FROM:
            stack = kernels.expand(stack)
        while piece is not None and piece.group == number:
            tiles = routing.tiles(piece)
            activated = empty_activations(tiles.num_rows, stack, x.device, is_quantized=is_fp8)
            kernels.gate_up(inputs, stack, tiles, activated)
            outputs = torch.empty(tiles.num_rows, x.shape[1], device=x.device)
            kernels.down(activated, stack, tiles, outputs)
            kernels.add_weighted(target, outputs, routing.places, routing.weights, tiles.first_row)
            piece = next(pieces, None)
        streamer.release()
