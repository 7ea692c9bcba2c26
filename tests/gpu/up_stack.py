"""A stack that `headwater up` starts, for the checks on a machine with a GPU."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def up_stack(
    prefix: str, first_port: int, place: Path, settings: Mapping[str, str], seconds: float
) -> Iterator[Path]:
    """Router, prefill and decode on three ports from `first_port` on; gives the folder of logs.

    Every prompt goes to prefill. Afterwards nothing is left.
    """
    router, prefill, decode = (f"127.0.0.1:{first_port + i}" for i in range(3))
    everything = {
        "shm.prefix": prefix,
        "state.run_dir": str(place / "run"),
        "gateway.enabled": "false",
        "router.listen": router,
        "router.prefill_address": prefill,
        "prefill.listen": prefill,
        "prefill.decode_address": decode,
        "router.decode_address": decode,
        "decode.listen": decode,
        "router.prompt_path": "prefill",
        "kv.pool_tokens": "32768",
        "objectives.shed_factor": "0",
        **settings,
    }
    flags = [part for key, value in everything.items() for part in ("--set", f"{key}={value}")]
    program = [sys.executable, "-m", "headwater.cli.main"]
    up, down = [*program, "up", *flags], [*program, "down", "--release", *flags]
    try:
        subprocess.run(up, check=True, stdout=subprocess.DEVNULL, timeout=seconds)
        yield place / "run" / prefix
    finally:
        subprocess.run(down, check=False, stdout=subprocess.DEVNULL)
