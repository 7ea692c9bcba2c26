"""GPU: whether there is one that will do, its driver, its link, and how fast weights get there."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.doctor.finding import Finding, error, ok, warning
from headwater.doctor.host import Host, gib

GPU = "GPU"
DRIVER = "driver"
LINK = "GPU link"
H2D = "H2D"

# Bytes per second and lane, after encoding: PCI Express Base Specification, 8b/10b up to 5 GT/s,
# 128b/130b from 8 GT/s, FLIT from 64 GT/s.
_LANE_RATES = {
    "2.5": 0.25e9,
    "5.0": 0.5e9,
    "8.0": 0.985e9,
    "16.0": 1.969e9,
    "32.0": 3.938e9,
    "64.0": 7.563e9,
}
# Copies reach about 87 % of this on an idle PCIe 5 link; below, something is wrong.
_LEAST_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One CUDA device as torch sees it; `problem` says why prefill will not use it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    pci_address: str
    problem: str = ""
    h2d_gb_per_s: float | None = None
    h2d_problem: str = ""


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What the process sees of CUDA; `demanded_by` are the settings that are "on"."""

    demanded_by: tuple[str, ...]
    torch_version: str
    cuda_version: str
    devices: tuple[GpuFacts, ...]


def check_gpus(host: Host, cuda: CudaFacts) -> list[Finding]:
    """The devices, or why there is none."""
    if not cuda.devices:
        return [_no_gpu(host, cuda)]
    findings = []
    for gpu in cuda.devices:
        text = (
            f"{gpu.index}: {gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
            f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        )
        if not gpu.problem:
            findings.append(ok(GPU, text))
        elif cuda.demanded_by:
            findings.append(error(GPU, f"{text}; {gpu.problem}", "do as it says"))
        else:
            findings.append(warning(GPU, f"{text}; {gpu.problem}", "do as it says"))
    return findings


def _no_gpu(host: Host, cuda: CudaFacts) -> Finding:
    has_device = any(name.startswith("nvidia") for name in host.names("/dev"))
    if has_device or host.text("/proc/driver/nvidia/version"):
        return warning(
            GPU,
            f"the machine has one, but torch {cuda.torch_version or '(missing)'} does not see it",
            "install torch with CUDA, and give the process the device (compose: profile gpu)",
        )
    if cuda.demanded_by:
        settings = " and ".join(cuda.demanded_by)
        remedy = f"set {settings} to auto or off, or give the process a GPU"
        return error(GPU, f"none, but {settings} demand one", remedy)
    return ok(GPU, "none; prompts and answers are computed on the CPU")


def check_driver(host: Host, cuda: CudaFacts) -> list[Finding]:
    """The kernel's driver and the CUDA that torch was built for."""
    line = host.text("/proc/driver/nvidia/version").partition("\n")[0]
    version = next((word for word in line.split() if word[:1].isdigit() and "." in word), "")
    if not (version or cuda.devices):
        return [ok(DRIVER, "none, and none needed")]
    return [ok(DRIVER, f"NVIDIA {version or 'unknown'}; torch for CUDA {cuda.cuda_version}")]


def check_links(host: Host, cuda: CudaFacts) -> list[Finding]:
    """Width and speed of each device's link, and what copies from host memory reach on it."""
    findings = []
    for gpu in cuda.devices:
        folder = f"/sys/bus/pci/devices/{gpu.pci_address}"
        limit = 0.0
        width, widest = (host.text(f"{folder}/{w}_link_width") for w in ("current", "max"))
        speed = host.text(f"{folder}/current_link_speed")
        if width.isdigit() and widest.isdigit():
            limit = int(width) * _LANE_RATES.get(speed.partition(" ")[0], 0.0) / 1e9
            text = f"{gpu.index}: x{width} of x{widest}, {speed}"
            if int(width) < int(widest):
                remedy = "put the card into a slot with all lanes; see the board's manual"
                findings.append(warning(LINK, text, remedy))
            else:
                findings.append(ok(LINK, text))
        else:
            findings.append(
                warning(
                    LINK,
                    f"{gpu.index}: this system does not tell width and speed of "
                    f"{gpu.pci_address or 'the device'}",
                    "judge by the measured rate; on the host: lspci -vv",
                )
            )
        findings.append(_h2d(gpu, limit))
    return findings


def _h2d(gpu: GpuFacts, limit: float) -> Finding:
    if gpu.h2d_gb_per_s is None:
        return error(
            H2D,
            f"{gpu.index}: weights cannot be copied: {gpu.h2d_problem}",
            "see memlock and the driver above",
        )
    text = f"{gpu.index}: {gpu.h2d_gb_per_s:.1f} GB/s from registered shared memory"
    if not limit:
        return ok(H2D, text)
    text += f", {gpu.h2d_gb_per_s / limit:.0%} of the link's {limit:.1f}"
    if gpu.h2d_gb_per_s < _LEAST_SHARE * limit:
        remedy = "see what else uses the link, and whether the memory lies on the GPU's node"
        return warning(H2D, text, remedy)
    return ok(H2D, text)
