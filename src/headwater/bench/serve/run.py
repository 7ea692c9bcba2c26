"""Sends the load and notes when what came back: in a closed loop, or at given times."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.bench.serve.load import LoadRequest
    from headwater.bench.serve.target import Target


@dataclass(slots=True)
class Outcome:
    """What became of a request; times are time.perf_counter() values.

    `sent_at` is when it should have been sent: a sender that is late must not flatter the server.
    `token_times` has an entry per token. `error` is the reason of the error that ended it, such as
    QUEUE_FULL; `retry_after_seconds` is when it told the caller to come back.
    """

    label: str
    sent_at: float
    ended_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    message: str = ""
    retry_after_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """All outcomes of one load, and how long it took."""

    outcomes: tuple[Outcome, ...]
    seconds: float


async def run_closed(target: Target, requests: Sequence[LoadRequest], concurrency: int) -> Run:
    """Keeps `concurrency` callers busy: each sends its next request when the last one has ended.

    A caller that is refused waits first, as long as it was told to.
    """
    started_at = time.perf_counter()
    waiting = iter(requests)
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for request in waiting:
            outcome = await send(target, request, time.perf_counter())
            outcomes.append(outcome)
            await asyncio.sleep(outcome.retry_after_seconds)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return Run(tuple(outcomes), time.perf_counter() - started_at)


async def run_open(target: Target, requests: Sequence[LoadRequest]) -> Run:
    """Sends each request at its time, however many are under way; requests are in time order."""
    started_at = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            at = started_at + (request.at_seconds or 0.0)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(group.create_task(send(target, request, at)))
    return Run(tuple(task.result() for task in tasks), time.perf_counter() - started_at)


async def send(target: Target, request: LoadRequest, sent_at: float) -> Outcome:
    """One request, to its end."""
    outcome = Outcome(request.label, sent_at)
    try:
        async with aclosing(target.stream(request)) as pieces:
            async for piece in pieces:
                now = time.perf_counter()
                outcome.token_times += [now] * piece.num_tokens
                outcome.prompt_tokens = piece.prompt_tokens or outcome.prompt_tokens
                outcome.cached_tokens = piece.cached_tokens or outcome.cached_tokens
    except HeadwaterError as error:
        outcome.error, outcome.message = error.reason(), str(error)
        if isinstance(error, ResourceError):
            outcome.retry_after_seconds = error.retry_after_ms / 1000
    outcome.ended_at = time.perf_counter()
    return outcome
