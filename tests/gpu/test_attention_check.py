"""A card whose attention is wrong is found before decode takes it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.gpu.attention_check import check_attention
from headwater.gpu.cached_attention import attended
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_moe"])
def test_a_tile_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Of 250, which is the least that can go wrong; and what is not a number."""
    from headwater.gpu.kernels import attend

    spec = ModelSpec.from_config(make_config("tiny", architecture, layers=3), "config.json")
    lost = 0

    def standing_in(
        queries: Tensor, cache: Tensor, positions: Tensor, shape: Any, bound: int, out: Tensor
    ) -> None:
        out.copy_(attended(queries, cache, positions - lost, shape))

    monkeypatch.setattr(attend, "attend", standing_in)
    check_attention(spec, torch.device("cpu"))
    lost = 64
    with pytest.raises(RuntimeError, match=r"attention of 1 rows over \d+ positions is wrong"):
        check_attention(spec, torch.device("cpu"))
    monkeypatch.setattr(attend, "attend", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"relative error nan\); report the card"):
        check_attention(spec, torch.device("cpu"))
