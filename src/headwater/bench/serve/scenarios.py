"""Loads with a name: the set that people who run models at home compare, and a mixed one.

The set has one user: an answer in prose, one in code, and the prompts of 10,000 and 90,000 tokens
that a document or a repository makes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwater.bench.serve.load import LoadRequest
from headwater.bench.serve.run import Outcome, send
from headwater.bench.serve.stats import tpot, ttft, variation
from headwater.errors import ConfigError, HeadwaterError, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.bench.serve.target import ModelLimits, Target

_PROSE = (
    "Tell the story of a lighthouse keeper who finds a message in a bottle, in about five hundred "
    "words, with a beginning, a middle and an end."
)
_CODE = (
    "Write a Python class for a priority queue on a binary heap, with push, pop, peek and a method "
    "that changes a priority. Give it type hints and docstrings, and write tests for it."
)
_ANSWER_TOKENS = 256
_LONG_ANSWER_TOKENS = 32
_LONG, _LONGEST = 10_000, 90_000
# Room that a chat template may take.
_TEMPLATE_TOKENS = 128
# Tokens of the running stream before, between and after the long prompts.
_UNDISTURBED_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Subject:
    """One line of the set; `prompt` is what the user says, or the length of a random prompt."""

    name: str
    prompt: str | int
    max_tokens: int


def standard_set(limits: ModelLimits) -> tuple[list[Subject], list[str]]:
    """The set, as far as the model's context allows, and a sentence about each change to it.

    Raises ConfigError when the context is too short for any of it.
    """
    if limits.max_context_tokens < 2 * _TEMPLATE_TOKENS:
        raise ConfigError(
            f"the model's context of {limits.max_context_tokens} tokens is too short for the set"
        )
    answer = min(_ANSWER_TOKENS, limits.max_context_tokens - _TEMPLATE_TOKENS)
    room = limits.max_context_tokens - _LONG_ANSWER_TOKENS
    longest = min(_LONGEST, room)
    # One ninth, as 10,000 is of 90,000, so that the two stay different.
    long = _LONG if room >= _LONG else room * _LONG // _LONGEST
    notes = [
        f"{name} has {length} tokens: the model's context holds {limits.max_context_tokens}"
        for name, length, wanted in (
            ("prefill-10k", long, _LONG),
            ("prefill-90k", longest, _LONGEST),
        )
        if length < wanted
    ]
    return [
        Subject("prose", _PROSE, answer),
        Subject("code", _CODE, answer),
        Subject("prefill-10k", long, _LONG_ANSWER_TOKENS),
        Subject("prefill-90k", longest, _LONG_ANSWER_TOKENS),
    ], notes


async def run_subject(
    target: Target,
    limits: ModelLimits,
    subject: Subject,
    *,
    warm_ups: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """One user, one request after the other; a row of medians, with coefficients of variation.

    Raises InternalError with the server's words when a request fails.
    """
    outcomes = []
    for turn in range(warm_ups + repeats):
        prompt: tuple[int, ...] | str
        if isinstance(subject.prompt, int):
            # New tokens each time: what is in the cache already costs nothing.
            draw = random.Random(f"{seed} {subject.name} {turn}")
            prompt = tuple(draw.randrange(limits.vocab_size) for _ in range(subject.prompt))
        else:
            prompt = subject.prompt
        request = LoadRequest(subject.name, prompt, subject.max_tokens)
        outcome = await send(target, request, time.perf_counter())
        if outcome.error is not None:
            raise InternalError(f"{subject.name}: {outcome.message}")
        outcomes.append(outcome)
    return _row(subject.name, outcomes[warm_ups:])


def _row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    firsts = [ttft(outcome) or 0.0 for outcome in outcomes]
    computed = [outcome.prompt_tokens - outcome.cached_tokens for outcome in outcomes]
    prefills = [count / first for count, first in zip(computed, firsts, strict=True) if first]
    decodes = [1 / pace for outcome in outcomes if (pace := tpot(outcome))]
    return {
        "load": name,
        "repeats": len(outcomes),
        "prompt_tokens": outcomes[-1].prompt_tokens,
        "cached_tokens": outcomes[-1].cached_tokens,
        "output_tokens": len(outcomes[-1].token_times),
        "ttft_seconds": statistics.median(firsts),
        "ttft_variation": variation(firsts),
        "prefill_tokens_per_second": statistics.median(prefills) if prefills else 0.0,
        "decode_tokens_per_second": statistics.median(decodes) if decodes else 0.0,
        "decode_variation": variation(decodes) if decodes else 0.0,
    }


async def run_interference(
    target: Target,
    limits: ModelLimits,
    *,
    prompt_tokens: int,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """What a stream under way feels of somebody's long prompts, in one and the same stream.

    The row's `ratio` is its time per token while a long prompt is computed, over that while none
    is. Raises ConfigError when the prompt does not fit, InternalError when the stream ends early.
    """
    if not 1 <= prompt_tokens < limits.max_context_tokens:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens}: must be in [1, {limits.max_context_tokens - 1}], "
            "as the model's context holds"
        )
    draw = random.Random(seed)
    stream = _Stream(target, limits, draw)
    windows, outcomes = [], []
    async with stream:
        await stream.grow(_UNDISTURBED_TOKENS)
        for _ in range(repeats):
            prompt = tuple(draw.randrange(limits.vocab_size) for _ in range(prompt_tokens))
            outcome = await send(target, LoadRequest("long", prompt, 1), time.perf_counter())
            if outcome.error is not None:
                raise InternalError(f"the long prompt: {outcome.message}")
            outcomes.append(outcome)
            windows.append((outcome.sent_at, outcome.token_times[0]))
            await stream.grow(_UNDISTURBED_TOKENS)
    alone, beside = stream.gaps(windows)
    if not beside:
        raise InternalError("no token came while a long prompt was computed; give a longer one")
    return {
        "load": f"stream beside {prompt_tokens}-token prompts",
        "repeats": repeats,
        "prompt_tokens": prompt_tokens,
        "long_ttft_seconds": statistics.median(ttft(outcome) or 0.0 for outcome in outcomes),
        "alone_tpot_seconds": statistics.fmean(alone),
        "beside_tpot_seconds": statistics.fmean(beside),
        "beside_max_gap_seconds": max(beside),
        "ratio": statistics.fmean(beside) / statistics.fmean(alone),
        "alone_tokens": len(alone),
        "beside_tokens": len(beside),
    }


class _Stream:
    """One long answer, and when its tokens came; runs inside its `async with`."""

    def __init__(self, target: Target, limits: ModelLimits, draw: random.Random) -> None:
        prompt = tuple(draw.randrange(limits.vocab_size) for _ in range(16))
        self._target = target
        self._request = LoadRequest("stream", prompt, limits.max_context_tokens - len(prompt))
        self._times: list[float] = []
        self._came = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._end: HeadwaterError | None = None

    async def __aenter__(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait([self._running])

    async def grow(self, count: int) -> None:
        """Returns when `count` more tokens have come; raises what ended the stream."""
        goal = len(self._times) + count
        while len(self._times) < goal:
            if self._end is not None:
                raise self._end
            self._came.clear()
            await self._came.wait()

    async def _run(self) -> None:
        try:
            async with aclosing(self._target.stream(self._request)) as pieces:
                async for piece in pieces:
                    self._times += [time.perf_counter()] * piece.num_tokens
                    self._came.set()
            self._end = InternalError("the running stream ended early; ask for fewer --repeats")
        except HeadwaterError as error:
            self._end = error
        finally:
            self._came.set()

    def gaps(self, windows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Seconds before each token that came outside of all windows, and within one of them."""
        alone, beside = [], []
        for before, after in itertools.pairwise(self._times):
            if any(start <= before and after <= end for start, end in windows):
                beside.append(after - before)
            elif all(after <= start or end <= before for start, end in windows):
                alone.append(after - before)
        return alone, beside
