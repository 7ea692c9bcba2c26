"""Do attacks on every gRPC service break, leak or block anything?

`python -m benchmarks.fuzz [--minutes 5] [--only KIND] [--seed S] [--json FILE]`; what is sent is in
tests/fuzz/attacks.py, what is checked after each round in tests/fuzz/fuzz.py. Ends at the first
round after which the stack is not as before.
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
from tests.fuzz.fuzz import SETTINGS, WEIGHTS, Fuzz
from tests.integration.stack import Stack
from tests.tiny_model import write_tiny_model

ROUND_SECONDS = 10.0


async def run(seed: int, seconds: float, kinds: list[str], folder: Path) -> dict[str, Any]:
    """One fuzzing; returns its figures."""
    prefix = f"hwfuzz-{os.getpid()}"
    stack = Stack(write_tiny_model(folder / "model"), prefix, folder, list(SETTINGS))
    fuzz = Fuzz(stack, seed, kinds)
    try:
        stack.start()
        await fuzz.run(seconds, ROUND_SECONDS)
        for name in stack.processes:
            print(f"{name:8} {fuzz.footprints[0][name]} -> {fuzz.footprints[-1][name]}")
            print(f"{name:8} growth {fuzz.growth(name)}")
        figures = fuzz.as_dict()
    finally:
        for complaint in fuzz.complaints:
            print(complaint)
        await asyncio.to_thread(stack.stop)
        reap(f"{prefix}.", release_weights=True)
    assert list_segments(f"{prefix}.") == []
    return figures


def main() -> int:
    """Runs and prints a summary; 1 when there was something to complain about."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", choices=WEIGHTS, help="one kind of attack instead of all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kinds = [arguments.only] if arguments.only else list(WEIGHTS)
        figures = asyncio.run(run(arguments.seed, 60 * arguments.minutes, kinds, Path(folder)))
    for name, count in figures["outcomes"].items():
        print(f"{name:52} {count}")
    write_result(arguments.json, {"seed": arguments.seed, "minutes": arguments.minutes} | figures)
    return 1 if figures["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
