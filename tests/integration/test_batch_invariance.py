"""An answer does not depend on who else is answered at the same time: bit for bit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headwater.client import Client
from headwater.generation import SamplingParams
from tests.integration.reference import greedy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.stack import Stack

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
# Of different lengths, some with a common beginning.
PROMPTS = [tuple(range(i % 3, 20 + 9 * i)) for i in range(12)]


async def _answer(stack: Stack, prompt: tuple[int, ...]) -> list[tuple[int, float]]:
    async with Client(stack.addresses["router"]) as client:
        return [
            (token.id, token.logprob or 0.0)
            async for event in client.generate(prompt, PARAMS)
            for token in event.tokens
        ]


async def test_together_as_alone(
    make_stack: Callable[..., Stack], tiny_model: Path, shm_prefix: str
) -> None:
    stack = make_stack("decode.threads=2", "decode.max_batch=8")
    stack.start()
    together = await asyncio.gather(*(_answer(stack, prompt) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert len(answer) == PARAMS.max_tokens
        # One after the other, now with prompts that are cached in part ...
        assert await _answer(stack, prompt) == answer
    # ... and in one process, on one thread.
    for prompt, answer in zip(PROMPTS[::4], together[::4], strict=True):
        assert greedy(tiny_model, shm_prefix, prompt, len(answer)) == answer
