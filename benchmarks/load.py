"""How fast do weights come into shared memory, and how many copies of them are in RAM?

`python benchmarks/load.py CHECKPOINT [--json FILE]`; the files leave the page cache first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

from record import write_result

from headwater.model.spec import ModelSpec
from headwater.shm import reap
from headwater.weights.loader import load_weights

PREFIX = f"hwbench-{os.getpid()}"


def meminfo() -> dict[str, int]:
    """Sizes in bytes by name, as the kernel counts them."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def drop_from_page_cache(folder: Path) -> None:
    """Makes the next reads come from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path) -> dict[str, float]:
    """One cold load and one re-attach."""
    spec = ModelSpec.load(folder)
    drop_from_page_cache(folder)
    before = meminfo()
    started = time.perf_counter()
    store = load_weights(folder, spec.tensors(), shm_prefix=PREFIX)
    loaded = time.perf_counter()
    after = meminfo()
    total = store.handle.total_bytes
    store.close()
    again = time.perf_counter()
    load_weights(folder, spec.tensors(), shm_prefix=PREFIX).close()
    attached = time.perf_counter()
    reap(f"{PREFIX}.", release_weights=True)
    return {
        "bytes": total,
        "load_seconds": loaded - started,
        "gb_per_s": total / (loaded - started) / 1e9,
        # Shared memory counts as cached; a second copy in the page cache would show here.
        "copies_in_ram": (after["Cached"] - before["Cached"]) / total,
        "reattach_seconds": attached - again,
    }


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--json")
arguments = parser.parse_args()
runs = [measure(arguments.checkpoint) for _ in range(5)]
median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
for key, value in median.items():
    print(f"{key:18} {value:.3f}")
write_result(arguments.json, {"median": median, "runs": runs})
