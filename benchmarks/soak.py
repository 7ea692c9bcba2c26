"""Does anything grow under random mixed load that should not?

`python -m benchmarks.soak [--minutes 20] [--seed S] [--json FILE]`; tests/integration/soak.py says
what the load is and what is checked after each round of half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import write_result

from headwater.shm import list_segments, reap
from tests.integration.soak import SETTINGS, Soak
from tests.integration.stack import Stack
from tests.tiny_model import write_tiny_model

ROUND_SECONDS = 30.0


async def run(seed: int, seconds: float, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """One soak; returns its figures, and the names of processes that logged a failure of ours."""
    prefix = f"hwsoak-{os.getpid()}"
    settings = [*SETTINGS, "router.prompt_path=auto"]
    stack = Stack(write_tiny_model(folder / "model"), prefix, folder, settings)
    stack.start()
    soak = Soak(stack, seed)
    try:
        await soak.run(seconds, ROUND_SECONDS)
        for name in stack.processes:
            print(f"{name:8} {soak.footprints[0][name]} -> {soak.footprints[-1][name]}")
            print(f"{name:8} growth {soak.growth(name)}")
        broken = [name for name in stack.processes if "Traceback" in stack.log(name)]
        for name in broken:
            print(stack.log(name)[-5000:])
        figures = soak.as_dict()
    finally:
        await asyncio.to_thread(stack.stop)
        reap(f"{prefix}.", release_weights=True)
    assert list_segments(f"{prefix}.") == []
    return figures, broken


def main() -> int:
    """Runs and prints a summary; 1 when there was an error of ours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        figures, broken = asyncio.run(run(arguments.seed, 60 * arguments.minutes, Path(folder)))
    for name, count in figures["outcomes"].items():
        print(f"{name:30} {count}")
    for error in figures["errors"]:
        print(error)
    write_result(arguments.json, {"seed": arguments.seed, "minutes": arguments.minutes} | figures)
    return 1 if figures["errors"] or broken else 0


if __name__ == "__main__":
    sys.exit(main())
