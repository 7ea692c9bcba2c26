"""The benchmark of hybrid steps, without a GPU: what it counts, not how fast it is."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from headwater.bench.gpu import hybrid
from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import FP8
from headwater.bench.timing import ReadProbe, stolen_seconds
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config

CONTEXT = 32


def _row(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(hybrid, "_STEPS_SECONDS", 0.0)
    config = make_config("tiny", "deepseek_v3", layers=2)
    spec = ModelSpec.from_config(config | {"quantization_config": FP8}, "config.json")
    with hybrid.workers(1) as pool, torch.inference_mode():
        decoder = HybridDecoder(
            spec, RandomModel(spec, 1), pool, torch.device("cpu"), max_rows=1, max_context=256
        )
        steps = hybrid._time_steps(decoder, 1, CONTEXT, ReadProbe(pool, 1 << 20))
        return hybrid._row(hybrid.Shape("tiny"), spec, decoder, 1, CONTEXT, steps)


def test_steps_with_nothing_stolen_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "stolen_seconds", lambda: 1.5)
    row = _row(monkeypatch)
    assert row["quiet_steps"] == row["steps"] >= 15
    assert row["quiet_roofline_ratio"] == row["roofline_ratio"] > 0
    assert row["quiet_cpu_ratio"] == row["cpu_ratio"] > row["roofline_ratio"]


def test_steps_with_something_stolen_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()
    monkeypatch.setattr(hybrid, "stolen_seconds", lambda: float(next(calls)))
    row = _row(monkeypatch)
    assert (row["quiet_steps"], row["quiet_roofline_ratio"]) == (0, None)
    assert row["roofline_ratio"] > 0


def test_stolen_time_only_grows() -> None:
    before = stolen_seconds()
    assert 0 <= before <= stolen_seconds()
