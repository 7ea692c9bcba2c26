"""The Triton kernels in Triton's interpreter against the reference: run by test_kernels.py.

A process of its own, since the interpreter is chosen when Triton is first imported. Prints a line
per case: name and relative error. On a GPU, `python -m tests.gpu.kernel_cases cuda` compiles them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.gpu.kernels import activations, combine, few_rows, grouped, reference
from headwater.gpu.kernels.experts import ExpertStack, Format, Rows, Tiles, cut_into_tiles
from headwater.model.expand import rows_of
from tests.gpu.samples import random_stack, relative_error

TOKENS, CHOICES = 24, 2
# One expert without a row, one with one, one with more than a tile.
COUNTS = (0, 1, 26, 21)
SHAPES = {"plain": (128, 160, 1), "ragged": (72, 96, 1), "shards": (256, 128, 2)}


def cases(device: torch.device) -> Iterator[tuple[str, float]]:
    """Every kernel, format and awkward shape."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, 200, generator=generator)
    yield "quantize", _quantized(x, device)
    for fmt, has_zeros, is_quantized, shape in _combinations():
        intermediate, hidden, shards = SHAPES[shape]
        stack = random_stack(
            fmt, len(COUNTS), shards, intermediate, hidden, generator, has_zeros=has_zeros
        )
        name = f"{fmt}{' zeros' * has_zeros}{' quantized' * is_quantized} {shape}"
        x = torch.randn(TOKENS, hidden, generator=generator)
        yield from _products(name, x, stack, device, is_quantized=is_quantized)
    for tokens in (1, 17):
        yield f"few_rows {tokens}", _few(tokens, generator, device)
    yield "add_weighted", _combined(generator, device)


def _combinations() -> Iterator[tuple[Format, bool, bool, str]]:
    formats: tuple[tuple[Format, bool, bool], ...] = (
        ("bf16", False, False),
        ("fp8", False, False),
        ("fp8", False, True),
        ("int4", False, False),
        ("int4", True, False),
        ("mxfp4", False, False),
    )
    for (fmt, has_zeros, is_quantized), shape in itertools.product(formats, SHAPES):
        if fmt in ("int4", "mxfp4") and shape == "ragged":
            continue  # four-bit groups divide the columns
        yield fmt, has_zeros, is_quantized, shape


def _products(
    name: str, x: Tensor, stack: ExpertStack, device: torch.device, *, is_quantized: bool
) -> Iterator[tuple[str, float]]:
    """Both products of a piece that starts in the middle of the sorted rows."""
    num_rows = sum(COUNTS)
    table, (piece,) = cut_into_tiles(COUNTS, [len(COUNTS)], 16, 64)
    first = 3
    index = torch.arange(first + num_rows) * 7 % TOKENS
    tiles = Tiles(torch.from_numpy(table) + torch.tensor([[0], [first], [first]]), first, 48, 16)
    tiles = Tiles(tiles.table.int(), first, piece.end_row, 16)
    values, scale = reference.quantize(x) if is_quantized else (x.bfloat16(), None)
    rows = Rows(values, scale, index.int())
    width = stack.gate_up.rows * stack.gate_up.num_shards
    expected = Rows(torch.full((num_rows, width), float("nan")))
    reference.gate_up(rows, stack, tiles, expected)
    ours = Rows(torch.full_like(expected.values, float("nan"), device=device))
    on_device = ExpertStack(*(_move(s, device) for s in (stack.gate_up, stack.down)))
    moved_tiles = Tiles(tiles.table.to(device), first, tiles.num_rows, 16)
    grouped.gate_up(_move(rows, device), on_device, moved_tiles, ours)
    yield f"gate_up {name}", relative_error(ours.values.cpu(), expected.values)

    act = expected.values.bfloat16()
    if is_quantized:
        blocks = stack.gate_up.num_shards * -(-stack.gate_up.rows // 128)
        quantized = Rows(
            torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(num_rows, blocks, device=device),
        )
        grouped.gate_up(_move(rows, device), on_device, moved_tiles, quantized)
        reference_rows = Rows(
            torch.empty(num_rows, width, dtype=torch.float8_e4m3fn),
            torch.empty(num_rows, blocks),
        )
        reference.gate_up(rows, stack, tiles, reference_rows)
        assert quantized.scale is not None
        assert reference_rows.scale is not None
        yield f"scales {name}", relative_error(quantized.scale.cpu(), reference_rows.scale)
        inputs = reference_rows
    else:
        inputs = Rows(act)
    out = torch.full((num_rows, x.shape[1]), float("nan"))
    reference.down(inputs, stack, tiles, out)
    mine = torch.full_like(out, float("nan"), device=device)
    grouped.down(_move(inputs, device), on_device, moved_tiles, mine)
    yield f"down {name}", relative_error(mine.cpu(), out)


def _quantized(x: Tensor, device: torch.device) -> float:
    """The scales must agree; the interpreter cuts off where a GPU rounds, so values need not."""
    values, scale = activations.quantize(x.to(device))
    _, expected_scale = reference.quantize(x)
    assert relative_error(scale.cpu(), expected_scale) < 1e-6
    wide = scale.cpu().repeat_interleave(128, dim=1)[:, : x.shape[1]]
    return relative_error(values.cpu().float() * wide, x)


def _few(tokens: int, generator: torch.Generator, device: torch.device) -> float:
    """A weight that is neither a multiple of the kernel's rows nor of the scales' blocks."""
    stack = random_stack("fp8", 1, 1, 200, 340, generator).gate_up
    values, scale = stack.values[0, 0, 1], stack.scale[0, 0, 1] if stack.scale is not None else None
    assert scale is not None
    x = torch.randn(tokens, 340, generator=generator).bfloat16()
    expected = torch.empty(200, 340)
    rows_of(values, scale, None).expand(0, expected)
    ours = few_rows.few_rows_product(x.to(device), values.to(device), scale.to(device))
    return relative_error(ours.cpu(), x.float() @ expected.t())


def _combined(generator: torch.Generator, device: torch.device) -> float:
    hidden = torch.randn(TOKENS, 40, generator=generator)
    outputs = torch.randn(20, 40, generator=generator).bfloat16()
    places = torch.randperm(TOKENS * CHOICES, generator=generator).view(TOKENS, CHOICES).int()
    weights = torch.rand(TOKENS, CHOICES, generator=generator)
    ours = hidden.clone().to(device)
    combine.add_weighted(ours, outputs.to(device), places.to(device), weights.to(device), first=5)
    reference.add_weighted(hidden, outputs, places, weights, 5)
    return relative_error(ours.cpu(), hidden)


def _move(holder: Any, device: torch.device) -> Any:
    """A dataclass of tensors, on `device`."""
    fields = {
        name: None if (t := getattr(holder, name)) is None else t.to(device)
        for name in holder.__dataclass_fields__
    }
    return type(holder)(**fields)


if __name__ == "__main__":
    for case, error in cases(torch.device(*sys.argv[1:] or ["cpu"])):
        print(f"{case}: {error:.2e}", flush=True)
