"""What the recipes lose at DeepSeek-V3's sizes, by arithmetic alone: see docs/gpu.md."""

from __future__ import annotations

import pytest
import torch

from headwater.bench.gpu.numerics import expert_row


@pytest.mark.parametrize(("is_quantized", "low", "high"), [(True, 2e-2, 6e-2), (False, 1e-3, 5e-3)])
def test_a_recipe_errs_by_its_format_and_ours_by_no_more(
    is_quantized: bool, low: float, high: float
) -> None:
    """E4M3 has four significant bits: no kernel is nearer to the exact result than that."""
    with torch.inference_mode():
        row = expert_row("normal", 4, torch.device("cpu"), is_quantized=is_quantized)
    assert low < row["recipe_error"] < high
    assert row["kernel_error"] < 5e-3
    assert row["total_error"] < high
