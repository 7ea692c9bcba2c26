"""Which device computes prompts or answers, and one clear sentence when none can.

Owns the checks; imports Triton only to see whether it is there.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from headwater.config.devices import parse_devices
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from headwater.config import GpuConfig

# The oldest cards for which our kernels are made.
_LEAST_CAPABILITY = (8, 0)
_GIB = 2**30
# Of a CPU that stands in for a GPU.
_CPU_GIB = 16.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A usable device, and how much of its memory may be used, in bytes."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    available_bytes: int

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies E4M3."""
        return self.capability >= (8, 9)


def devices_for_prefill(config: GpuConfig) -> tuple[str, ...]:
    """The devices of gpu.prefill_devices by name; auto: gpu.device and all GPUs after it.

    One that is named as decode's comes last, as the first goes on while decode works.
    """
    names = parse_devices(config.prefill_devices)
    if not names:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = range(config.device, max(config.device + 1, count))
        names = tuple(f"cuda:{index}" for index in found)
    return tuple(sorted(names, key=lambda name: name == f"cuda:{config.decode_device}"))


def device_for_decode(config: GpuConfig) -> int:
    """The number of decode's CUDA device."""
    if config.decode_device >= 0:
        return config.decode_device
    device = torch.device(devices_for_prefill(config)[-1])
    return config.device if device.index is None else device.index


def find_device(name: str, vram_gib: float) -> Gpu:
    """The device of that name for prefill; see find_gpu. A CPU is one without limits."""
    device = torch.device(name)
    if device.type == "cpu":
        return Gpu(device, "a CPU", (0, 0), int((vram_gib or _CPU_GIB) * _GIB))
    return find_gpu(device.index or 0, vram_gib)


def find_gpu(
    index: int, vram_gib: float = 0.0, *, purpose: Literal["prefill", "decode"] = "prefill"
) -> Gpu:
    """CUDA device `index`, of which at most `vram_gib` are used; 0: whatever is free.

    What this process used before and has dropped is free again.

    Raises ConfigError that says in one sentence what is missing and what to do.
    """
    # Read when CUDA starts: with fewer, streams may share a queue and wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    what = "prompts" if purpose == "prefill" else "answers"
    field = "gpu.prefill_devices or gpu.device" if purpose == "prefill" else "gpu.decode_device"
    remedy = f"set gpu.{purpose} to off to compute {what} on the CPU"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"gpu: this process sees no CUDA device (torch {torch.__version__}); install a driver "
            f"and torch with CUDA, give the container a GPU, or {remedy}"
        )
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"{field}: names cuda:{index}, but this process sees {torch.cuda.device_count()} CUDA "
            f"devices, the first of which is cuda:0; choose another, or {remedy}"
        )
    device = torch.device("cuda", index)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"{field}: cuda:{index}, {name}, is too old: compute capability "
            f"{capability[0]}.{capability[1]}, 8.0 is needed; choose another, or {remedy}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"gpu: the package triton is missing; install it, or {remedy}")
    give_back()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    available = min(free_bytes, int(vram_gib * _GIB)) if vram_gib else free_bytes
    return Gpu(device, name, capability, available)


def give_back() -> None:
    """Lets the driver have what torch keeps of dropped tensors.

    Workspaces of cuBLAS come first: they lie within blocks that were much larger, and one of 32 MiB
    kept 4.4 GiB.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
