"""Who computes answers: the choice when decode starts, with a CPU in the place of the GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from headwater.config import GpuConfig
from headwater.errors import ConfigError, ResourceError
from headwater.gpu import device
from headwater.gpu.hybrid_model import HybridModel
from headwater.kernels import WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.model.interface import Model
from headwater.services.decode.models import answer_model
from tests.gpu.models import tiny_weights

GIB = 2**30


def _made(folder: Path, prefix: str, config: GpuConfig) -> Model:
    with tiny_weights(folder, prefix, "mixtral", "bf16") as (spec, weights):
        return answer_model(config, spec, weights, WorkerPool(1), max_batch=2, max_context=512)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(tmp_path: Path, shm_prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """auto and off go on with the CPU, auto says why in one sentence; on does not start."""
    caplog.set_level(logging.INFO)
    assert isinstance(_made(tmp_path / "1", shm_prefix, GpuConfig()), NativeTransformer)
    (said,) = [r.getMessage() for r in caplog.records if "answers are" in r.getMessage()]
    assert said.startswith("answers are computed on the CPU: gpu: this process sees no CUDA device")
    assert said.endswith("set gpu.decode to off to compute answers on the CPU")
    assert "\n" not in said
    off = GpuConfig(decode="off")
    assert isinstance(_made(tmp_path / "2", shm_prefix, off), NativeTransformer)
    with pytest.raises(ConfigError, match=r"gpu: this process sees no CUDA device"):
        _made(tmp_path / "3", shm_prefix, GpuConfig(decode="on"))


def test_a_device_with_room_and_one_without(
    tmp_path: Path,
    shm_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of what is free, decode takes half, or all when prefill takes nothing."""
    caplog.set_level(logging.INFO)
    free = [3 * GIB // 2 + GIB // 8]

    def find(index: int, vram_gib: float, *, purpose: str) -> device.Gpu:
        assert (index, purpose) == (0, "decode")
        bytes_there = min(free[0], int(vram_gib * GIB)) if vram_gib else free[0]
        return device.Gpu(torch.device("cpu"), "a double", (9, 0), bytes_there)

    monkeypatch.setattr(device, "find_gpu", find)
    monkeypatch.setattr(device, "devices_for_prefill", lambda _: ("cpu",))
    shares_nothing = GpuConfig(prefill="off")
    assert isinstance(_made(tmp_path / "1", shm_prefix, shares_nothing), HybridModel)
    free[0] = 5 * GIB // 4
    shared = GpuConfig()
    assert isinstance(_made(tmp_path / "2", shm_prefix, shared), NativeTransformer)
    assert "answers are computed on the CPU: gpu: decode needs at least 1" in caplog.text
    with pytest.raises(ResourceError, match=r"raise gpu\.decode_vram_gib"):
        _made(tmp_path / "3", shm_prefix, GpuConfig(decode="on"))
    free[0] = 9 * GIB
    with pytest.raises(ResourceError, match=r"1\.0 GiB are there"):
        _made(tmp_path / "4", shm_prefix, GpuConfig(decode="on", decode_vram_gib=1.0))
