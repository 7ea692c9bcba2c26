"""How much sooner does a prompt start whose first 2,000 tokens were computed for somebody else?

`python -m benchmarks.prefix [CHECKPOINT] [--rounds 5] [--json FILE]`; medians and token counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.live import default_model, live_stack
from benchmarks.record import write_result

from headwater.client import Client
from headwater.generation import SamplingParams

SHARED_TOKENS = 2000
OWN_TOKENS = 60
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


async def ask(address: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens, as the router reports them."""
    async with Client(address) as client:
        async for event in client.generate(prompt, PARAMS):
            last = event
    assert last.usage is not None
    assert last.timings is not None
    return last.timings.time_to_first_token_seconds, last.usage.cached_tokens


async def measure(checkpoint: Path, rounds: int, folder: Path) -> dict[str, float]:
    """In turn: a prompt that nobody has sent, and one that shares its beginning."""
    draw = random.Random(0)
    cold, warm, cached = [], [], []
    with live_stack(checkpoint, folder, "kv.pool_tokens=32768") as stack:
        address = stack.addresses["router"]
        for turn in range(rounds + 1):
            shared = tuple(draw.randrange(256) for _ in range(SHARED_TOKENS))
            own = [tuple(draw.randrange(256) for _ in range(OWN_TOKENS)) for _ in range(2)]
            first, none = await ask(address, shared + own[0])
            second, found = await ask(address, shared + own[1])
            assert none == 0
            if turn:  # the first round warms up
                cold.append(first)
                warm.append(second)
                cached.append(found)
    return {
        "shared_tokens": SHARED_TOKENS,
        "prompt_tokens": SHARED_TOKENS + OWN_TOKENS,
        "cached_tokens": min(cached),
        "ttft_seconds_first": statistics.median(cold),
        "ttft_seconds_second": statistics.median(warm),
        "ttft_ratio": statistics.median(cold) / statistics.median(warm),
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or default_model()
    with tempfile.TemporaryDirectory(prefix=f"prefix-{os.getpid()}-") as folder:
        figures = asyncio.run(measure(checkpoint, arguments.rounds, Path(folder)))
    for name, value in figures.items():
        print(f"{name:20} {value:.3f}")
    write_result(arguments.json, {"model": checkpoint.name} | figures)


if __name__ == "__main__":
    main()
