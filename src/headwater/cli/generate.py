"""`headwater generate`: streams the continuation of a text."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from headwater.cli.sampling import sampling_from
from headwater.client import Client
from headwater.rpc.link import Link

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config
    from headwater.generation import SamplingParams


def generate(arguments: argparse.Namespace, config: Config) -> int:
    """Prints the answer as it comes, or as JSON at the end."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    asyncio.run(_generate(config, prompt, sampling_from(arguments), arguments.json))
    return 0


async def _generate(config: Config, prompt: str, sampling: SamplingParams, is_json: bool) -> None:
    pieces = []
    async with Client(config.router.listen, Link.of(config)) as client:
        async for event in client.generate(prompt, sampling):
            pieces.append(event.text)
            if not is_json:
                print(event.text, end="", flush=True)
    if not is_json:
        print()
        return
    assert event.finish_reason is not None
    assert event.usage is not None
    assert event.timings is not None
    summary = {
        "text": "".join(pieces),
        "finish_reason": event.finish_reason.value,
        "usage": dataclasses.asdict(event.usage),
        "timings": dataclasses.asdict(event.timings),
    }
    print(json.dumps(summary, indent=2))
