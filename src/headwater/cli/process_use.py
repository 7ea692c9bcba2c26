"""How much CPU and memory the processes of a stack use, where they run on this machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# One of these is in the command line of every process of a stack. A process in a container tells a
# pid of the container's, which out here may be anybody's.
_OURS = (b"headwater", b"smg")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Use:
    """CPUs' worth of time since the last look, zero at the first; memory of its own, in bytes."""

    cpus: float
    private_bytes: int


class ProcessUse:
    """Remembers the last look at each process, to tell what happened since."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: dict[str, tuple[int, float, float]] = {}

    def of(self, name: str, pid: int | None) -> Use | None:
        """What the process uses; None when it does not run, or not here."""
        if not pid:
            return None
        folder = self._proc / str(pid)
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            resident, shared = (folder / "statm").read_text(encoding="ascii").split()[1:3]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            return None
        if not any(name in command for name in _OURS):
            return None
        # Fields 14 and 15 of proc(5): user and system time.
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
        now = time.monotonic()
        last_pid, last_seconds, last_at = self._before.get(name, (pid, seconds, now))
        self._before[name] = (pid, seconds, now)
        elapsed = now - last_at
        is_same = last_pid == pid and elapsed > 0
        cpus = (seconds - last_seconds) / elapsed if is_same else 0.0
        return Use(cpus, (int(resident) - int(shared)) * _PAGE_BYTES)
