"""What is said when a GPU is missing, too old or too small; registration of host memory."""

from __future__ import annotations

import functools
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headwater.config import GpuConfig, load_config
from headwater.errors import ConfigError, ResourceError, UnavailableError
from headwater.gpu.device import device_for_decode, devices_for_prefill, find_gpu
from headwater.gpu.host_ranges import HostRange, RegisteredRanges


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one RTX 3090 of which 20 GiB are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * 2**30, 24 * 2**30))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    # Only builds of torch with CUDA have it.
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return monkeypatch


def test_what_was_dropped_is_given_back_before_memory_is_counted(
    fake_cuda: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    for owner, name in (
        (torch._C, "_cuda_clearCublasWorkspaces"),
        (torch.cuda, "empty_cache"),
    ):
        fake_cuda.setattr(owner, name, functools.partial(done.append, name), raising=False)
    found = torch.cuda.mem_get_info("cuda:0")

    def counted(_: object) -> tuple[int, int]:
        done.append("counted")
        return found

    fake_cuda.setattr(torch.cuda, "mem_get_info", counted)
    find_gpu(0)
    assert done == ["_cuda_clearCublasWorkspaces", "empty_cache", "counted"]


def test_a_gpu_that_will_do(fake_cuda: pytest.MonkeyPatch) -> None:
    gpu = find_gpu(0)
    assert (gpu.name, gpu.available_bytes) == ("NVIDIA GeForce RTX 3090", 20 * 2**30)
    assert not gpu.has_fp8
    assert find_gpu(0, 6).available_bytes == 6 * 2**30
    assert find_gpu(0, 100).available_bytes == 20 * 2**30


def test_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"sees no CUDA device .* set gpu.prefill to off"):
        find_gpu(0)


def test_no_such_device(fake_cuda: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gpu.device: names cuda:3, but .* sees 1 CUDA dev"):
        find_gpu(3)
    with pytest.raises(ConfigError, match=r"gpu.decode_device: names cuda:1.* gpu.decode to off"):
        find_gpu(1, purpose="decode")


@pytest.mark.parametrize(
    ("count", "settings", "prefill", "decode"),
    [
        (1, {}, ("cuda:0",), 0),
        (2, {}, ("cuda:0", "cuda:1"), 1),
        (4, {"device": 2}, ("cuda:2", "cuda:3"), 3),
        (2, {"decode_device": 0}, ("cuda:1", "cuda:0"), 0),
        (2, {"prefill_devices": "cuda:0", "decode_device": 1}, ("cuda:0",), 1),
        (2, {"prefill_devices": "cuda:1, cuda:0"}, ("cuda:1", "cuda:0"), 0),
        (
            3,
            {"prefill_devices": "cuda:0, cuda:2, cuda:1", "decode_device": 0},
            ("cuda:2", "cuda:1", "cuda:0"),
            0,
        ),
        (0, {"prefill_devices": "cpu, cpu"}, ("cpu", "cpu"), 0),
    ],
)
def test_who_computes_where(
    fake_cuda: pytest.MonkeyPatch,
    count: int,
    settings: dict[str, Any],
    prefill: tuple[str, ...],
    decode: int,
) -> None:
    fake_cuda.setattr(torch.cuda, "device_count", lambda: count)
    config = GpuConfig(**settings)
    assert devices_for_prefill(config) == prefill
    assert device_for_decode(config) == decode


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:0, cpu", "0,1", "cuda:0;cuda:1", "cuda:00", "cuda:\u0661"]
)
def test_devices_that_nobody_knows(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set: gpu.prefill_devices: "):
        load_config(config_file=None, environ={}, assignments=[f"gpu.prefill_devices={text}"])


@pytest.mark.parametrize("value", [0.0, 0.05, 1.0])
def test_shares_of_the_time_that_prompts_can_live_with(value: float) -> None:
    found = load_config(config_file=None, environ={}, assignments=[f"gpu.copy_share={value}"])
    assert found.gpu.copy_share == value


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0.01", "must be 0, or at least 0.05 so that prompts get on, got 0.01"),
        ("-0.1", "must be between 0.0 and 1.0, got -0.1"),
        ("1.1", "must be between 0.0 and 1.0, got 1.1"),
        ("nan", "must be finite"),
    ],
)
def test_shares_of_the_time_that_they_cannot(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"--set: gpu.copy_share: {what}"):
        load_config(config_file=None, environ={}, assignments=[f"gpu.copy_share={text}"])


def test_too_old(fake_cuda: pytest.MonkeyPatch) -> None:
    fake_cuda.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"is too old: compute capability 7.5, 8.0 is needed"):
        find_gpu(0)


def test_no_triton(fake_cuda: pytest.MonkeyPatch) -> None:
    fake_cuda.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"the package triton is missing"):
        find_gpu(0)


class _Cudart:
    """Registers what it is told to; refuses read-only mappings, or whatever is at `refused`."""

    def __init__(self, refused: int = 0) -> None:
        self.registered: list[tuple[int, int, int]] = []
        self.released: list[int] = []
        self.may_go_on = threading.Semaphore(0)
        self._refused = refused

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if flags or address == self._refused:
            return 1
        self.may_go_on.acquire()
        self.registered.append((address, num_bytes, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.released.append(address)
        return 0


def test_ranges_are_registered_in_order_and_let_go() -> None:
    cudart = _Cudart()
    ranges = RegisteredRanges([HostRange(4096 * i, 4096) for i in (1, 2, 3)], cudart=cudart)
    ranges.start()
    assert not ranges.is_ready(0)
    cudart.may_go_on.release()
    ranges.wait(0)
    assert ranges.is_ready(0)
    assert not ranges.is_ready(2)
    cudart.may_go_on.release(2)
    ranges.wait(2)
    assert cudart.registered == [(4096, 4096, 0), (8192, 4096, 0), (12288, 4096, 0)]
    assert ranges.registered_bytes == 3 * 4096
    ranges.close()
    assert cudart.released == [4096, 8192, 12288]


def test_who_waits_for_a_range_is_told_when_all_are_let_go() -> None:
    cudart = _Cudart()
    ranges = RegisteredRanges([HostRange(4096 * i, 4096) for i in (1, 2)], cudart=cudart)
    ranges.start()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranges.wait, 1)
        closing = threading.Thread(target=ranges.close)
        closing.start()
        with pytest.raises(UnavailableError, match="takes other weights"):
            waiting.result(timeout=60)
        cudart.may_go_on.release(2)
        closing.join()
    with pytest.raises(UnavailableError, match="takes other weights"):
        ranges.wait(0)


def test_a_range_that_cuda_refuses_is_a_sentence_for_whoever_waits() -> None:
    cudart = _Cudart(refused=8192)
    cudart.may_go_on.release(5)
    ranges = RegisteredRanges([HostRange(4096, 4096), HostRange(8192, 4096)], cudart=cudart)
    ranges.start()
    with pytest.raises(ResourceError, match=r"cudaHostRegister refused 4096 bytes .*ulimit -l"):
        ranges.wait(1)
    ranges.wait(0)
    ranges.close()
    assert cudart.released == [4096]
