"""One answer to a request, from a prefilled lease to its last token, whatever dies meanwhile."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing
from typing import TYPE_CHECKING

from headwater.errors import InternalError, UnavailableError
from headwater.generation import TextEvent, Usage
from headwater.services.router.answer import Answer, Stopwatch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from headwater.generation import SamplingParams
    from headwater.services.router.engines import Lease
    from headwater.services.router.preparation import Preparation
    from headwater.services.router.recovery import Recovery
    from headwater.telemetry.metrics import RequestMetrics


class Branch:
    """Generates the answer of one index.

    After the loss of an engine it leases and computes prompt and answer so far anew, and goes on
    from there: the sampler's draws depend on seed and position only, so the caller sees each token
    once, and the same ones. Without a lease it begins with that.
    """

    def __init__(
        self,
        index: int,
        lease: Lease | None,
        cached_tokens: int,
        answer: Answer,
        metrics: RequestMetrics,
        sampling: SamplingParams,
        preparation: Preparation,
        recovery: Recovery,
        watch: Stopwatch,
    ) -> None:
        self._index = index
        self._lease = lease
        self._cached_tokens = cached_tokens
        self._answer = answer
        self._metrics = metrics
        self._last_token_at: float | None = None
        self._sampling = sampling
        self._preparation = preparation
        self._recovery = recovery
        self._watch = watch
        self._output: list[int] = []

    async def events(self) -> AsyncGenerator[TextEvent, None]:
        """The answer; the last event has finish reason, usage and timings."""
        while True:
            try:
                if self._lease is None:
                    self._lease = await self._preparation.again(self._output)
                async with aclosing(self._generate(self._lease)) as events:
                    async for event in events:
                        yield event
                return
            except UnavailableError as lost:
                self._lease = None
                await self._recovery.wait(lost)

    async def _generate(self, lease: Lease) -> AsyncGenerator[TextEvent, None]:
        last: TextEvent | None = None
        try:
            async with aclosing(
                self._preparation.generate(lease, self._sampling, self._output)
            ) as steps:
                async for step in steps:
                    self._recovery.progressed()
                    self._token_came(self._watch.token())
                    self._output.extend(token.id for token in step.tokens)
                    event = dataclasses.replace(self._answer.take(step), index=self._index)
                    if event.finish_reason is not None:
                        last = event
                        break
                    yield event
        finally:
            # The end of the decode engine's stream is the end of the lease; nothing else is.
            if last is None or last.matched_stop is not None:
                self._preparation.give_back(lease)
            else:
                self._preparation.ended(lease)
        if last is None:
            raise InternalError("the decode engine ended its stream without a finish reason")
        usage = Usage(
            self._preparation.num_prompt_tokens, self._answer.num_tokens, self._cached_tokens
        )
        yield dataclasses.replace(last, usage=usage, timings=self._watch.timings())

    def _token_came(self, now: float) -> None:
        if self._last_token_at is not None:
            self._metrics.token_gap(now - self._last_token_at)
        self._last_token_at = now
