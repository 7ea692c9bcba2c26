"""Some faults of each kind, in a random order; `python -m benchmarks.faults` runs hundreds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.integration.faults import SETTINGS, FaultBench, Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.stack import Stack

SEED = 3
# Each victim twice, each fault twice, each stage at least once.
PLANS = [
    Plan("prefill", "prefill", "kill"),
    Plan("prefill", "hand-over", "cut"),
    Plan("decode", "reserving", "kill"),
    Plan("decode", "decoding", "stop"),
    Plan("router", "streaming", "stop"),
    Plan("router", "prefill", "cut"),
]


async def test_faults(make_stack: Callable[..., Stack], roomy_model: Path, shm_prefix: str) -> None:
    stack = make_stack(*SETTINGS, model=roomy_model)
    print(f"seed {SEED}")
    plans = random.Random(SEED).sample(PLANS, len(PLANS))
    async with FaultBench(stack, shm_prefix, seed=SEED, stop_seconds=0.5) as bench:
        for plan in plans:
            print(plan)
            print(await bench.run(plan))
