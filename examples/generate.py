"""Streams a text from the router over gRPC: `python examples/generate.py [ADDRESS]`."""

import asyncio
import sys

from headwater.client import DEFAULT_ADDRESS, Client
from headwater.generation import SamplingParams


async def main(address: str) -> None:
    """Prints the answer as it comes, then where the time went."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    async with Client(address) as client:
        async for event in client.generate("The capital of France is", params):
            print(event.text, end="", flush=True)
    print(f"\n{event.usage}\n{event.timings}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ADDRESS))
