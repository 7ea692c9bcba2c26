"""What the kernel knows of this process: CPU time, memory, files, start; read from /proc/self."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.telemetry.metrics import observe

if TYPE_CHECKING:
    from headwater.telemetry.metrics import Reading

_PROC = Path("/proc/self")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def observe_process(service: str, proc: Path = _PROC) -> None:
    """Exports the process_* metrics of the catalogue."""

    def resident() -> Reading:
        return _statm(proc)[1] * _PAGE_BYTES

    def private() -> Reading:
        _, total, shared = _statm(proc)
        return (total - shared) * _PAGE_BYTES

    started_at = _start_time_seconds(proc)
    observe(
        {
            "process_cpu_seconds": lambda: sum(os.times()[:2]),
            "process_resident_memory_bytes": resident,
            "process_private_memory_bytes": private,
            "process_open_fds": lambda: len(list((proc / "fd").iterdir())),
            "process_start_time_seconds": lambda: started_at,
        },
        {"service": service},
    )


def _statm(proc: Path) -> tuple[int, int, int]:
    """Pages of size, resident, and of that shared: file-backed or shared memory. See proc(5)."""
    size, resident, shared = (proc / "statm").read_text(encoding="ascii").split()[:3]
    return int(size), int(resident), int(shared)


def _start_time_seconds(proc: Path) -> float:
    """Unix time of the process's start: field 22 of /proc/PID/stat counts ticks since boot."""
    after_name = (proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot = int(after_name[19]) / _TICKS_PER_SECOND
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
