"""Files of figures that say where they come from."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_figures(path: str | None, figures: object) -> None:
    """Writes JSON with the command and the machine beside the figures; nothing without a path."""
    if path is None:
        return
    command = command_line(Path(sys.argv[0]).name, sys.argv[1:])
    origin = {"command": command, "machine": machine()}
    Path(path).write_text(json.dumps(origin | {"figures": figures}, indent=2) + "\n")


def command_line(program: str, arguments: Sequence[str]) -> str:
    """What was run, folders left out: where files lay on this machine means nothing elsewhere."""
    return " ".join([program, *(re.sub(r"(^|=)/\S*/", r"\1", each) for each in arguments)])


def machine() -> dict[str, object]:
    """What this process may use of which machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
    }
