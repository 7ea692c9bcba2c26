"""The checkpoint: whether it is there, and how fast it can be read: so long loading takes."""

from __future__ import annotations

from pathlib import Path

from headwater.doctor.finding import Finding, error, ok, warning
from headwater.doctor.host import gib

MODEL = "model"
DISK = "disk"

# Below it even 10 GiB take half a minute; a SATA disk gives half a GB/s, an NVMe one several.
_SLOW_GB_PER_S = 0.4


def check_model(path: str, files: list[Path]) -> list[Finding]:
    """Whether there are weights at `path`; empty: the embedded default model."""
    if files:
        size = gib(sum(file.stat().st_size for file in files))
        return [ok(MODEL, f"{files[0].parent.name}: {len(files)} files of weights, {size}")]
    if path:
        remedy = "give a checkpoint folder with model.path"
        return [error(MODEL, f"model.path: {path} holds no *.safetensors", remedy)]
    return [ok(MODEL, "the default model, which the first `headwater up` converts")]


def check_disk(gb_per_s: float | None, num_bytes: int, what: str) -> list[Finding]:
    """The rate at which `what`, of `num_bytes`, was read past the page cache; None: not tried."""
    if not num_bytes:
        return [ok(DISK, f"not measured: {what} is not on disk")]
    if gb_per_s is None:
        return [ok(DISK, f"not measured: the disk of {what} takes no direct reads")]
    seconds = num_bytes / gb_per_s / 1e9
    text = f"{gb_per_s:.2f} GB/s; {what}, {gib(num_bytes)}, loads in {seconds:.0f} s or more"
    if gb_per_s < _SLOW_GB_PER_S:
        return [warning(DISK, text, "keep checkpoints on an NVMe disk of this machine")]
    return [ok(DISK, text)]
