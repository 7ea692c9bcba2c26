"""Which implementation computes prompts, where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from headwater.config import Config, GpuConfig
from headwater.errors import ConfigError, HeadwaterError, ResourceError, UnavailableError
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.team_model import TeamModel
from headwater.kernels import WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.services.prefill.models import PromptModels
from headwater.services.prefill.ways import PassWays
from tests.gpu.models import tiny_weights


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _models(prefill: Literal["auto", "on", "off"], devices: str = "auto") -> PromptModels:
    gpu = GpuConfig(prefill=prefill, prefill_devices=devices)
    return PromptModels(Config(gpu=gpu), WorkerPool(1), PassWays(64))


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


@pytest.mark.parametrize(
    ("prefill", "problem", "is_raised"),
    [
        ("on", ConfigError("there is none"), True),
        ("on", ResourceError("none has room"), False),
        ("auto", ConfigError("there is none"), False),
    ],
)
def test_devices_that_were_named_and_are_not_there_end_the_start(
    tmp_path: Path,
    shm_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prefill: Literal["auto", "on"],
    problem: HeadwaterError,
    is_raised: bool,
) -> None:
    def start(_: TeamModel) -> None:
        raise problem

    monkeypatch.setattr(TeamModel, "start", start)
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "bf16") as (spec, weights):
        models = _models(prefill, "cpu, cpu")
        if is_raised:
            with pytest.raises(ConfigError, match="there is none"):
                models.make(spec, weights)
        else:
            assert isinstance(models.make(spec, weights), StreamedModel)
            assert f"prompts are computed on cpu alone: {problem}" in caplog.text
        models.close()


def test_who_stops_meanwhile_starts_nothing_any_more(
    tmp_path: Path, shm_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "bf16") as (spec, weights):
        models = _models("auto", "cpu, cpu")
        start = TeamModel.start

        def stop_and_start(team: TeamModel) -> None:
            models.stop()
            start(team)

        monkeypatch.setattr(TeamModel, "start", stop_and_start)
        for message in ("stopping, or takes other weights", "prefill is stopping"):
            with pytest.raises(UnavailableError, match=message):
                models.make(spec, weights)
        models.close()
