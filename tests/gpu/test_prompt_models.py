"""Which implementation computes prompts, where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from headwater.config import Config, GpuConfig
from headwater.errors import ConfigError
from headwater.kernels import WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.services.prefill.models import PromptModels
from headwater.services.prefill.ways import PassWays
from tests.gpu.models import tiny_weights


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _models(prefill: Literal["auto", "on", "off"]) -> PromptModels:
    return PromptModels(Config(gpu=GpuConfig(prefill=prefill)), WorkerPool(1), PassWays(64))


def test_without_a_gpu_the_cpu_computes_and_says_why(
    tmp_path: Path, shm_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "bf16") as (spec, weights):
        for prefill in ("auto", "off"):
            caplog.clear()
            with caplog.at_level("INFO"):
                models = _models(prefill)
                assert isinstance(models.make(spec, weights), NativeTransformer)
            assert models.num_gpus == 0
            assert models.streamed_bytes == 0
            told = "prompts are computed on the CPU: gpu: this process sees no CUDA device"
            assert (told in caplog.text) == (prefill == "auto")
            models.close()


def test_a_gpu_that_must_be_there_and_is_not_ends_the_start(
    tmp_path: Path, shm_prefix: str
) -> None:
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "bf16") as (spec, weights):
        models = _models("on")
        with pytest.raises(ConfigError, match="gpu: this process sees no CUDA device"):
            models.make(spec, weights)
