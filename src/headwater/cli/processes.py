"""Processes that outlive the command that started them: started, found again, stopped.

A process is known by a file that holds its pid and its start time, for pids are used again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

POLL_SECONDS = 0.05
LOG_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class ManagedProcess:
    """One process of a stack, by name; its files are <run_dir>/<name>.pid and .log."""

    name: str
    run_dir: Path

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self.run_dir / f"{self.name}.log"

    @property
    def _pid_path(self) -> Path:
        return self.run_dir / f"{self.name}.pid"

    def pid(self) -> int | None:
        """Its pid, or None when it does not run."""
        try:
            pid, started = self._pid_path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return None
        return int(pid) if _start_time(int(pid)) == started else None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts it in a session of its own, detached from this terminal."""
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.log_path.open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environ),
            )
        self._pid_path.write_text(f"{child.pid} {_start_time(child.pid)}", encoding="ascii")
        # It is not ours to wait for: silence the warning about a child that still runs.
        child.returncode = 0

    def stop(self, grace_seconds: float) -> bool:
        """SIGTERM, and SIGKILL when that does not help; returns whether it was running."""
        pid = self.pid()
        if pid is None:
            self._pid_path.unlink(missing_ok=True)
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not self._wait_for_exit(grace_seconds):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._wait_for_exit(grace_seconds)
        self._pid_path.unlink(missing_ok=True)
        return True

    def kill(self) -> None:
        """SIGKILL, which even a stopped process cannot ignore; its death is left to be found."""
        if (pid := self.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _wait_for_exit(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pid() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


def _start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot; None when the process is gone or a zombie."""
    # Our own dead children would stay zombies, since nobody waits for them.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            # The command name, in parentheses, may hold spaces.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
