"""The life of a request in the router: queue, lease, prefill, decode, text.

Knows the engines only through headwater.services.router.engines, and nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import defaultdict
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError, InternalError, UnavailableError
from headwater.generation import TextEvent, Usage
from headwater.services.router.abort import AbortSwitch
from headwater.services.router.admission import Admission
from headwater.services.router.answer import Answer, Stopwatch
from headwater.services.router.leases import LeaseKeeper
from headwater.telemetry.metrics import record_request
from headwater.telemetry.rate import RateMeter
from headwater.telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from headwater.generation import SamplingParams
    from headwater.services.router.engines import DecodeEngine, Engine, Lease, PrefillEngine
    from headwater.services.router.requests import RouterRequest
    from headwater.services.router.served_model import ServedModel

logger = logging.getLogger(__name__)

# A request that neither starts nor is refused is worse than one refused.
MAX_WAIT_SECONDS = 600.0


class RouterCore:
    """Serves requests for one model with one prefill and one decode engine."""

    def __init__(
        self,
        *,
        model: ServedModel,
        prefill: PrefillEngine,
        decode: DecodeEngine,
        max_running: int,
        max_waiting: int,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
    ) -> None:
        self.model = model
        self.prefill = prefill
        self.decode = decode
        self.admission = Admission(
            max_running=max_running, max_waiting=max_waiting, max_wait_seconds=max_wait_seconds
        )
        self.num_finished = 0
        self.generated_tokens = RateMeter()
        self._leases = LeaseKeeper(decode)
        self._switches: defaultdict[str, set[AbortSwitch]] = defaultdict(set)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """What the router depends on."""
        return (self.prefill, self.decode)

    async def generate(
        self, request: RouterRequest, deadline: float | None = None
    ) -> AsyncGenerator[TextEvent, None]:
        """Answers a request; the last event has finish reason, usage and timings.

        `deadline` is a time.monotonic() value. Closing the generator, or cancelling the task that
        waits for it, stops the engines and gives the lease back; the caller must do one of them.

        Raises HeadwaterError: InvalidRequestError, QueueFullError, UnavailableError when an engine
        is down, DeadlineError, CancelledError after `abort`.
        """
        switch = AbortSwitch()
        self._switches[request.request_id].add(switch)
        try:
            async with aclosing(self._run(request, deadline)) as events:
                while event := await switch.guard(partial(anext, events, None)):
                    yield event
        finally:
            self.num_finished += 1
            self._forget(request.request_id, switch)

    def abort(self, request_id: str) -> bool:
        """Ends the requests of that name with CancelledError; False when there is none."""
        switches = self._switches.get(request_id, set())
        for switch in switches:
            switch.throw()
        return bool(switches)

    async def stop(self) -> None:
        """Ends heartbeats and waits until the last leases are given back."""
        await self._leases.stop()
        if self._background:
            await asyncio.wait(self._background)

    async def _run(
        self, request: RouterRequest, deadline: float | None
    ) -> AsyncGenerator[TextEvent, None]:
        watch = Stopwatch()
        self._check_engines()
        name = request.request_id
        prompt = await self.model.encode(request.prompt)
        sampling = self.model.fit(len(prompt), request.sampling)
        answer = Answer(request, self.model.tokenizer)
        lease = await self._admit(name, len(prompt), sampling, deadline)
        watch.admitted()
        last: TextEvent | None = None
        try:
            with self._leases.keeping(lease):
                async with aclosing(self.prefill.prefill(name, prompt, lease, deadline)) as shares:
                    async for share in shares:
                        yield TextEvent("", prefill_progress=share)
                watch.prefilled()
                # Stop strings are matched here; the decode engine refuses them.
                plain = dataclasses.replace(sampling, stop=(), include_stop=False)
                async with aclosing(
                    self.decode.generate(name, lease, prompt, plain, deadline)
                ) as steps:
                    async for step in steps:
                        watch.token()
                        event = answer.take(step)
                        self.generated_tokens.add(len(event.tokens))
                        if event.finish_reason is not None:
                            last = event
                            break
                        yield event
        finally:
            self.admission.leave(watch.held_seconds())
            # The end of the decode engine's stream is the end of the lease; nothing else is.
            if last is None or last.matched_stop is not None:
                self._spawn(self._release(lease))
        if last is None:
            raise InternalError(f"{self.decode.name} ended its stream without a finish reason")
        usage = Usage(len(prompt), answer.num_tokens, lease.cached_tokens)
        timings = watch.timings()
        record_request(self.model.name, usage, timings)
        yield dataclasses.replace(last, usage=usage, timings=timings)

    def _check_engines(self) -> None:
        """Fails at once, and by name, instead of after a time-out."""
        for engine in self.engines:
            if not engine.is_serving:
                raise UnavailableError(
                    f"{engine.name} at {engine.address} is not serving: it is starting, loading "
                    "or stopped; try again later"
                )

    async def _admit(
        self, name: str, num_prompt_tokens: int, sampling: SamplingParams, deadline: float | None
    ) -> Lease:
        """Waits for a place and for KV blocks."""
        assert sampling.max_tokens is not None  # ServedModel.fit fills it in

        async def reserve(max_new_tokens: int = sampling.max_tokens) -> Lease:
            call = asyncio.ensure_future(
                self.decode.reserve(name, num_prompt_tokens, max_new_tokens, deadline)
            )
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                # The lease may have been granted by now, and then nobody else would return it.
                self._spawn(self._release_when_granted(call))
                raise

        with span("router.queue"):
            return await self.admission.enter(reserve, deadline)

    async def _release_when_granted(self, call: asyncio.Future[Lease]) -> None:
        with contextlib.suppress(HeadwaterError):
            await self._release(await call)

    async def _release(self, lease: Lease) -> None:
        try:
            await self.decode.release(lease.epoch, [lease.id])
        except HeadwaterError as error:
            # Its time to live runs out by itself.
            logger.warning("lease %d was not given back: %s", lease.id, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` beyond the end, or the cancellation, of the request it belongs to."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _forget(self, request_id: str, switch: AbortSwitch) -> None:
        switches = self._switches[request_id]
        switches.discard(switch)
        if not switches:
            del self._switches[request_id]
