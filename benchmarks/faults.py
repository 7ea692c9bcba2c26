"""Does anything get lost, hang or leak when processes die, stop or lose their connections?

`python -m benchmarks.faults [--runs 100] [--stop-seconds 20] [--seed S] [--json FILE]`: each run
breaks one process of a live stack at one stage of a request; tests/integration/faults.py says what
is checked. Ends at the first failure.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.record import write_result

from headwater.shm import list_segments, reap
from tests.integration.faults import SETTINGS, FaultBench, Report, make_plans
from tests.integration.stack import Stack
from tests.tiny_model import write_tiny_model


async def run_all(seed: int, runs: int, stop_seconds: float, folder: Path) -> list[Report]:
    """Runs the plans one after the other on one stack."""
    prefix = f"hwfaults-{os.getpid()}"
    model = write_tiny_model(folder / "model", context=4096)
    stack = Stack(model, prefix, folder, list(SETTINGS))
    reports = []
    try:
        async with FaultBench(stack, prefix, seed=seed, stop_seconds=stop_seconds) as bench:
            for number, plan in enumerate(make_plans(runs, seed), start=1):
                print(
                    f"{number:4} {plan.fault:4} {plan.victim:7} while {plan.stage:9}: ",
                    end="",
                    flush=True,
                )
                report = await bench.run(plan)
                reports.append(report)
                print(f"{report.outcome}, {report.seconds:.1f} s", flush=True)
    finally:
        reap(f"{prefix}.", release_weights=True)
    assert list_segments(f"{prefix}.") == []
    return reports


def main() -> None:
    """Runs and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--stop-seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reports = asyncio.run(
            run_all(arguments.seed, arguments.runs, arguments.stop_seconds, Path(folder))
        )
    outcomes = collections.Counter(report.outcome for report in reports)
    restarts = [r.restart_seconds for r in reports if r.restart_seconds is not None]
    summary = {
        "seed": arguments.seed,
        "runs": len(reports),
        "stop_seconds": arguments.stop_seconds,
        "outcomes": dict(outcomes),
        "restart_seconds_median": statistics.median(restarts) if restarts else None,
        "restart_seconds_max": max(restarts, default=None),
        "seconds": time.monotonic() - started_at,
    }
    for name, value in summary.items():
        print(f"{name:24} {value}")
    write_result(
        arguments.json, {"summary": summary, "runs": [report.as_dict() for report in reports]}
    )


if __name__ == "__main__":
    main()
