"""The Triton kernels against plain torch, in Triton's interpreter; and how rows become tiles."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.gpu.kernels import reference
from headwater.gpu.kernels.experts import cut_into_tiles
from headwater.gpu.kernels.table import HEIGHTS, MOST_QUANTIZED, shapes_for, tile_rows
from headwater.gpu.routing import route
from tests.gpu.samples import relative_error

# What a wrong scale, a wrong shard or a lost row exceeds by far.
TOLERANCE = 1e-5
# Results that are rounded, or, by the interpreter, cut off: up to a step of E4M3, BF16 or FP16.
ROUNDED = {"quantize": 0.1, "mla": 8e-3, "gqa": 8e-3, "expand": 1e-3}


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton, which torch brings along on Linux with CUDA",
)

# Bytes of shared memory that one block may have.
SHARED_MEMORY = {86: 99 << 10, 90: 227 << 10}


@needs_triton
def test_kernels_compile_and_start_for_real_cards_without_a_compiler_of_c(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "CC")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_cases", *map(str, SHARED_MEMORY)],
        env=kept | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, "the fake driver found something wrong"
    names = set()
    for line in done.stdout.splitlines():
        card, name, shared = line.split()
        names.add((int(card), name))
        assert int(shared) <= SHARED_MEMORY[int(card)], line
    kernels = (
        "_grouped",
        "_expand",
        "_add_weighted",
        "_add_and_norm",
        "_gate",
        "_mla_inputs",
        "_attend",
    )
    assert {(card, name) for card in SHARED_MEMORY for name in kernels} <= names
    assert {(90, "_multiply"), (90, "_multiply_one")} <= names


@needs_triton
def test_kernels_agree_with_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernel_cases"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    errors = {}
    for line in done.stdout.splitlines():
        name, _, error = line.rpartition(": ")
        errors[name] = float(error)
    assert len(errors) > 30
    wrong = {n: e for n, e in errors.items() if not e < ROUNDED.get(n.split()[0], TOLERANCE)}
    assert wrong == {}


def test_quantised_blocks_are_scaled_to_the_format() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    x[2] = 0
    x[3] *= 1e6
    values, scale = reference.quantize(x)
    assert scale.shape == (5, 3)
    restored = values.float() * scale.repeat_interleave(128, dim=1)[:, :300]
    # Rounding to three bits after the first: 2^-4 at most, 2^-4 / sqrt(3) or less on average.
    assert relative_error(restored, x) < 0.036
    assert torch.equal(restored[2], x[2])


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_every_row_once(seed: int) -> None:
    chooser = random.Random(seed)
    groups = [chooser.randint(1, 4) for _ in range(chooser.randint(1, 5))]
    counts = [chooser.choice((0, 0, 1, 15, 16, 17, 100)) for _ in range(sum(groups))]
    height, max_rows = chooser.choice(((16, 32), (16, 64), (32, 96)))
    table, pieces = cut_into_tiles(counts, groups, height, max_rows)
    rows = 0
    owners = [(g, e) for g, size in enumerate(groups) for e in range(size)]
    seen = np.zeros(len(counts), dtype=int)
    for piece in pieces:
        assert piece.first_row == rows
        assert 0 < piece.end_row - piece.first_row <= max_rows
        for expert, first, end in table[:, piece.first_tile : piece.end_tile].T:
            assert first == rows
            assert 0 < end - first <= height
            seen[owners.index((piece.group, expert))] += end - first
            rows = int(end)
        assert rows == piece.end_row
    assert seen.tolist() == counts
    assert rows == sum(counts)
    assert [p.group for p in pieces] == sorted(p.group for p in pieces)


def test_rows_are_sorted_by_expert_and_foreign_ones_come_last() -> None:
    experts = torch.tensor([[5, 2], [2, 3], [7, 4]])
    weights = torch.arange(6.0).view(3, 2)
    routing = route(experts, weights, range(2, 5), [2, 1], max_rows=64)
    # Experts 2, 2, 3, 4 by token, then those of other ranks, 5 and 7.
    assert routing.index.tolist() == [0, 1, 1, 2, 0, 2]
    assert routing.places.tolist() == [[4, 0], [1, 2], [5, 3]]
    assert [(p.group, p.first_row, p.end_row) for p in routing.pieces] == [(0, 0, 3), (1, 3, 4)]
    assert routing.tiles(routing.pieces[0]).table.tolist() == [[0, 1], [0, 2], [2, 3]]


def test_tile_heights_fit_the_rows() -> None:
    rows = (0, 1, 16, 17, 64, 65, 5000)
    heights = [tile_rows(n, is_quantized=False) for n in rows]
    assert heights == [16, 16, 16, 32, 64, 128, 128]
    heights = [tile_rows(n, is_quantized=True) for n in rows]
    assert heights == [16, 16, 16, 32, 64, 64, 64]
    for height in HEIGHTS:
        for capability in ((8, 6), (8, 9), (9, 0), (12, 0), (10, 3)):
            shapes = shapes_for(height, capability)
            if shapes.down_quantized is not None:
                # The width of gate and up is the width of an activation's scale block.
                assert shapes.gated.block_n == 128
            assert (shapes.down_quantized is not None) == (height <= MOST_QUANTIZED)
