"""The memory plan: what a load needs and what the machine has, said before loading.

Owns the reading of free shared memory and RAM, a container's limit included. Allocates nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import SharedMemoryFullError

SHM_FOLDER = Path("/dev/shm")

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a segment needs, bytes free in /dev/shm, and bytes of RAM that can be had."""

    needed_bytes: int
    shm_available_bytes: int
    ram_available_bytes: int

    def __str__(self) -> str:
        return (
            f"weights need {_gib(self.needed_bytes)}; /dev/shm has "
            f"{_gib(self.shm_available_bytes)} free, RAM {_gib(self.ram_available_bytes)}"
        )

    def check(self, name: str) -> None:
        """Raises SharedMemoryFullError with the exact shortfall when the segment cannot fit."""
        shortfalls = (
            (
                "/dev/shm",
                self.shm_available_bytes,
                "enlarge it (docker run --shm-size=..., or mount -o remount,size=... /dev/shm) or "
                "free segments (headwater shm reap)",
            ),
            ("RAM", self.ram_available_bytes, "free memory or raise the container's limit"),
        )
        for place, available_bytes, remedy in shortfalls:
            if self.needed_bytes > available_bytes:
                raise SharedMemoryFullError(
                    f"segment '{name}': {place} is too small: needs {self.needed_bytes} bytes, has "
                    f"{available_bytes} available, {self.needed_bytes - available_bytes} short; "
                    f"{remedy}"
                )


def plan_memory(needed_bytes: int) -> MemoryPlan:
    """The plan for a segment of `needed_bytes` as the machine is now."""
    shm = os.statvfs(SHM_FOLDER)
    return MemoryPlan(needed_bytes, shm.f_bavail * shm.f_frsize, _ram_available_bytes())


def _ram_available_bytes() -> int:
    meminfo = Path("/proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_available_bytes()
    return available if limit is None else min(available, limit)


def _cgroup_available_bytes() -> int | None:
    """What a container's limit leaves, page cache that can go counted as free; None: no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = (_CGROUP / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    fields = dict(line.split() for line in stat.splitlines())
    reclaimable = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    return int(limit) - used + reclaimable


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
