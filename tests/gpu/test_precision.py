"""What activations are rounded to on a GPU, and that it suffices where values are large."""

from __future__ import annotations

import torch
from torch.nn import functional

from headwater.gpu.kernels import reference
from headwater.gpu.kernels.experts import (
    ExpertStack,
    Rows,
    Tiles,
    cut_into_tiles,
    empty_activations,
)
from headwater.gpu.precision import ACTIVATED_SCALE, GREATEST, activated
from tests.gpu.samples import random_stack, relative_error


def test_what_is_between_products_keeps_eleven_bits_over_seven_decades() -> None:
    up = torch.logspace(-1, 6, 200)
    gate = torch.full_like(up, 3.0)
    exact = functional.silu(gate.double()) * up.double()
    found = activated(gate, up).double() / ACTIVATED_SCALE
    assert float(((found - exact).abs() / exact).max()) < 2**-11 + 1e-6


def test_what_is_too_large_ends_at_the_greatest_number_and_nan_stays() -> None:
    gate = torch.tensor([1e3, 1e3, float("nan")])
    found = activated(gate, torch.tensor([1e9, -1e9, 1.0]))
    assert found[:2].tolist() == [GREATEST, -GREATEST]
    assert bool(found[2].isnan())


def test_an_expert_of_large_activations_loses_no_more_than_others() -> None:
    """30,000 between the products, as trained models have it; FP16 as it is ends at 65,504."""
    generator = torch.Generator().manual_seed(2)
    stack = random_stack("fp8", 1, 2, 256, 128, generator)
    table, (piece,) = cut_into_tiles([5], [1], 16, 16)
    tiles = Tiles(torch.from_numpy(table), 0, piece.end_row, 16)
    x = torch.randn(5, 128, generator=generator)
    errors = []
    for size in (1.0, 300.0):
        rows = Rows((x * size).half(), None, torch.arange(5).int())
        outputs = []
        for inner in (empty_activations(5, stack, x.device, is_quantized=False), None):
            # With FP32 between the products nothing but their order is left.
            middle = inner or Rows(torch.empty(5, 256))
            reference.gate_up(rows, stack, tiles, middle)
            out = torch.empty(5, 128)
            reference.down(middle, stack, tiles, out)
            outputs.append((out, middle.values.float() / ACTIVATED_SCALE))
        errors.append(relative_error(outputs[0][0], outputs[1][0]))
    assert float(outputs[1][1].abs().max()) > 3e4
    assert max(errors) < 5e-4


def test_expanded_experts_are_the_same_experts() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(9, 128, generator=generator).half()
    for fmt in ("bf16", "fp8", "int4", "mxfp4"):
        stack = random_stack(fmt, 3, 2, 256, 128, generator)
        table, (piece,) = cut_into_tiles([4, 0, 5], [3], 16, 16)
        tiles = Tiles(torch.from_numpy(table), 0, piece.end_row, 16)
        found = [_outputs(each, x, tiles) for each in (reference.expand(stack), stack)]
        assert relative_error(*found) < 5e-4, fmt


def _outputs(stack: ExpertStack, x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    inner = empty_activations(len(x), stack, x.device, is_quantized=False)
    reference.gate_up(Rows(x, None, torch.arange(len(x)).int()), stack, tiles, inner)
    out = torch.empty(len(x), x.shape[1])
    reference.down(inner, stack, tiles, out)
    return out
