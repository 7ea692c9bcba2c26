"""How soon does a killed process serve again, with the weights still in shared memory?

`python -m benchmarks.restart [CHECKPOINT] [--rounds 5] [--json FILE]`: seconds from the start of
each process to SERVING, one at a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.live import default_model, live_stack
from benchmarks.record import write_result

PROCESSES = ("decode", "prefill", "router")


def measure(checkpoint: Path, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds per process and round."""
    seconds: dict[str, list[float]] = {name: [] for name in PROCESSES}
    with live_stack(checkpoint, folder) as stack:
        for _ in range(rounds):
            for name in PROCESSES:
                stack.kill(name)
                started_at = time.monotonic()
                stack.spawn(name)
                stack.wait_until_serving(name)
                seconds[name].append(time.monotonic() - started_at)
                for other in PROCESSES:
                    stack.wait_until_serving(other)
    return seconds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or default_model()
    with tempfile.TemporaryDirectory(prefix=f"restart-{os.getpid()}-") as folder:
        seconds = measure(checkpoint, arguments.rounds, Path(folder))
    load = os.getloadavg()[0]
    for name, values in seconds.items():
        print(f"{name:8} median {statistics.median(values):.2f} s, longest {max(values):.2f} s")
    print(f"load average {load:.1f}")
    write_result(
        arguments.json, {"model": checkpoint.name, "load_average": load, "seconds": seconds}
    )


if __name__ == "__main__":
    main()
