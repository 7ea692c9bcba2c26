"""What recipes lose, in an expert of DeepSeek-V3's sizes and in whole models; see docs/gpu.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.bench.gpu.numerics import expert_row
from headwater.bench.gpu.whole_model import bench_whole_model
from headwater.convert.linear_formats import LinearTarget
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import make_config


@pytest.mark.parametrize(("is_quantized", "low", "high"), [(True, 2e-2, 6e-2), (False, 1e-4, 5e-4)])
def test_a_recipe_errs_by_its_format_and_ours_by_no_more(
    is_quantized: bool, low: float, high: float
) -> None:
    """E4M3 has four significant bits, FP16 eleven: no kernel is nearer to the exact result."""
    with torch.inference_mode():
        row = expert_row("normal", 4, torch.device("cpu"), is_quantized=is_quantized)
    assert low < row["recipe_error"] < high
    assert row["kernel_error"] < 5e-3
    assert row["total_error"] < high


def test_whole_models_are_held_against_the_reference(tmp_path: Path) -> None:
    """By the recipes, and by CPU kernels of this process and of another one."""
    config = make_config("tiny", "deepseek_v3", layers=2)
    write_synthetic(tmp_path / "model", config, LinearTarget("fp8"))
    prompts = [[5, 77, 300, 12, 9, 41], [8, 9]]
    rows = list(bench_whole_model(tmp_path / "model", prompts, torch.device("cpu"), "scalar"))
    names = list(dict.fromkeys(row["what"] for row in rows))
    assert names[0] == "CPU reference"
    assert names[1].startswith("CPU kernels, ")
    assert names[2:] == ["CPU kernels, scalar", "sweep, W8A16", "sweep, W8A8"]
    assert [row["tokens"] for row in rows] == [6, 2] * 5
    assert all(row["hidden_error"] > 0 for row in rows[:2]), "it rounds, the truth does not"
    errors = {name: [r["hidden_error"] for r in rows if r["what"] == name] for name in names}
    assert all(error < 0.1 for name in names[:4] for error in errors[name])
    assert min(errors[names[4]]) > max(errors[names[3]]), "E4M3 has seven bits fewer"
    assert max(errors[names[4]]) < 0.3
    assert all(row["kv_error"] < 0.1 for row in rows)
