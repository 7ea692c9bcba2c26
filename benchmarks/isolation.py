"""What does a stream feel of somebody's long prompt, with prefill and decode on different cores?

`python -m benchmarks.isolation CHECKPOINT --prefill-cpus 0-7 --decode-cpus 8-15 [--prompt-tokens
16384] [--repeats 1] [--json FILE]`; CPUs as `taskset` writes them. The router runs beside decode,
whose pool has one thread less for it. Cores that are two threads of one, as hyper-threads are,
should be on the same side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.live import live_stack
from benchmarks.record import write_result

from headwater.bench.serve.scenarios import run_interference
from headwater.bench.serve.target import RouterTarget


def count_cpus(cpus: str) -> int:
    """How many CPUs a list like "0-3,8" names."""
    ends = [part.partition("-") for part in cpus.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


async def interference(address: str, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    """The row of `headwater bench serve --scenario mixed`."""
    target = RouterTarget(address)
    try:
        limits = await target.limits()
        return await run_interference(
            target, limits, prompt_tokens=prompt_tokens, repeats=repeats, seed=0
        )
    finally:
        await target.close()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prefill-cpus", required=True)
    parser.add_argument("--decode-cpus", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    prefill, decode = arguments.prefill_cpus, arguments.decode_cpus
    context = json.loads((arguments.checkpoint / "config.json").read_text())[
        "max_position_embeddings"
    ]
    settings = (
        f"prefill.threads={count_cpus(prefill)}",
        f"decode.threads={max(1, count_cpus(decode) - 1)}",
        # The stream may grow to the model's whole context.
        f"kv.pool_tokens={context + (arguments.repeats + 1) * arguments.prompt_tokens}",
        "router.prompt_path=prefill",
        "gpu.prefill=off",
        "gpu.decode=off",
        # The prompt is to be computed however late it comes.
        "objectives.shed_factor=0",
    )
    with tempfile.TemporaryDirectory(prefix=f"isolation-{os.getpid()}-") as name:
        cpus = {"prefill": prefill, "decode": decode, "router": decode}
        with live_stack(arguments.checkpoint, Path(name), *settings, cpus=cpus) as stack:
            figures = asyncio.run(
                interference(stack.addresses["router"], arguments.prompt_tokens, arguments.repeats)
            )
    for key, value in figures.items():
        print(f"{key:24} {value}")
    write_result(arguments.json, {"model": arguments.checkpoint.name} | figures)


if __name__ == "__main__":
    main()
