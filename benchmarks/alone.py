"""Is each of many answers, bit for bit, what it is alone? On the default model, or another one.

`python -m benchmarks.alone [CHECKPOINT] [--seed S] [--json FILE]`: 32 mixed requests in a KV pool
far too small, first one after the other, then at once; see tests/integration/test_mixed_load.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.live import default_model, live_stack
from benchmarks.record import write_result

from tests.integration.test_generate import wait_until_idle
from tests.integration.test_mixed_load import (
    NUM_REQUESTS,
    answer,
    answer_among_others,
    decode_status,
    make_cases,
)

SETTINGS = ("kv.pool_tokens=640", "decode.max_batch=8", "objectives.shed_factor=0")


async def compare(checkpoint: Path, seed: int, folder: Path) -> dict[str, object]:
    """Both runs on one stack."""
    with live_stack(checkpoint, folder, *SETTINGS) as stack:
        cases = make_cases(seed)
        started_at = time.monotonic()
        alone = [await answer(stack, case, lambda _: None) for case in cases]
        await wait_until_idle(stack)
        alone_at = time.monotonic()
        before = decode_status(stack)
        together = await asyncio.gather(
            *(answer_among_others(stack, cases, index) for index in range(NUM_REQUESTS))
        )
        together_at = time.monotonic()
        await wait_until_idle(stack)
        status = decode_status(stack)
    different = [i for i in range(NUM_REQUESTS) if alone[i] != together[i]]
    return {
        "seed": seed,
        "requests": NUM_REQUESTS,
        "different": different,
        "tokens": sum(map(len, together)),
        "cancelled": sum(case.hangs_up_after is not None for case in cases),
        "preemptions": status.preemptions - before.preemptions,
        "cached_tokens": status.prefix_cached_tokens - before.prefix_cached_tokens,
        "alone_seconds": alone_at - started_at,
        "together_seconds": together_at - alone_at,
    }


def main() -> int:
    """Prints the comparison; 1 when an answer was different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or default_model()
    with tempfile.TemporaryDirectory(prefix=f"alone-{os.getpid()}-") as folder:
        figures = asyncio.run(compare(checkpoint, arguments.seed, Path(folder)))
    for name, value in figures.items():
        print(f"{name:18} {value}")
    write_result(arguments.json, {"model": checkpoint.name} | figures)
    return 1 if figures["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
