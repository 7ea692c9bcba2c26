"""What every result file says of itself: machine, commit, command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from headwater.cli.bench_output import command_line, machine

ROOT = Path(__file__).resolve().parent.parent
# Before any measurement binds the caller to one of them.
_CORES = len(os.sched_getaffinity(0))


def write_result(path: str | None, figures: object) -> None:
    """Writes `figures` with their origin; does nothing without a path."""
    if path is None:
        return
    origin = {
        "machine": machine() | {"cores": _CORES},
        "commit": _commit(),
        "command": command_line(f"python {_script()}", sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
    }
    Path(path).write_text(json.dumps(origin | {"figures": figures}, indent=2) + "\n")


def _script() -> str:
    """The script as it is named in the repository, for folders of a machine mean nothing."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _commit() -> str:
    result = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"
