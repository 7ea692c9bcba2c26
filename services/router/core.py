"""The life of a request in the router: queue, lease, prefill, decode, text.

Knows the engines only through headwater.services.router.engines, and nothing of gRPC.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import defaultdict
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING

from headwater.errors import OverloadedError, ResourceError, UnavailableError
from headwater.generation import TextEvent
from headwater.services.router.abort import AbortSwitch
from headwater.services.router.admission import Admission
from headwater.services.router.answer import Answer, Stopwatch
from headwater.services.router.branch import Branch
from headwater.services.router.leases import LeaseKeeper
from headwater.services.router.merge import merge
from headwater.services.router.preparation import Background, Preparation
from headwater.services.router.recent import RecentAnswers
from headwater.services.router.recovery import Recovery
from headwater.services.router.requests import operation_of
from headwater.services.router.shedding import Shedding
from headwater.telemetry.metrics import RequestMetrics
from headwater.telemetry.rate import RateMeter
from headwater.telemetry.request_span import RequestSpan

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from headwater.generation import SamplingParams
    from headwater.objectives import Objective
    from headwater.services.router.engines import DecodeEngine, Engine, Lease, PrefillEngine
    from headwater.services.router.objectives import Attainment, Objectives
    from headwater.services.router.outlook import Outlook
    from headwater.services.router.requests import RouterRequest
    from headwater.services.router.served_model import ServedModel
    from headwater.services.router.shedding import Expectation

logger = logging.getLogger(__name__)

# A request that neither starts nor is refused is worse than one refused.
MAX_WAIT_SECONDS = 600.0


class RouterCore:
    """Serves requests for one model with one prefill and one decode engine.

    A request that loses an engine waits up to `recovery_seconds` for it and goes on.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        prefill: PrefillEngine,
        decode: DecodeEngine,
        objectives: Objectives,
        outlook: Outlook,
        max_running: int,
        max_waiting: int,
        shed_factor: float = 0.0,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
        recovery_seconds: float = 0.0,
        records_content: bool = False,
    ) -> None:
        self.model = model
        self.prefill = prefill
        self.decode = decode
        self.admission = Admission(
            max_running=max_running, max_waiting=max_waiting, max_wait_seconds=max_wait_seconds
        )
        self.objectives = objectives
        self.outlook = outlook
        self._shedding = Shedding(outlook, self.admission, shed_factor)
        self.num_finished = 0
        self.generated_tokens = RateMeter()
        self.recent = RecentAnswers()
        self._metrics = RequestMetrics(model.name)
        self._records_content = records_content
        self._leases = LeaseKeeper(decode)
        self._switches: defaultdict[str, set[AbortSwitch]] = defaultdict(set)
        self._background = Background()
        self._recovery_seconds = recovery_seconds

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

        Raises HeadwaterError: InvalidRequestError, QueueFullError, OverloadedError when the first
        token would come too late, UnavailableError when an engine is down, DeadlineError,
        CancelledError after `abort`.
        """
        switch = AbortSwitch()
        self._switches[request.request_id].add(switch)
        span = RequestSpan(records_content=self._records_content)
        watch = Stopwatch()
        try:
            async with aclosing(self._run(request, deadline, span, watch)) as events:
                while event := await switch.guard(partial(anext, events, None)):
                    yield event
        except BaseException as failure:
            self._metrics.failed(operation_of(request.prompt), failure, watch.total_seconds())
            raise
        finally:
            span.close(self.model.text_of_ids)
            self.num_finished += 1
            self._forget(request.request_id, switch)

    def abort(self, request_id: str) -> bool:
        """Ends the requests of that name with CancelledError; False when there is none."""
        switches = self._switches.get(request_id, set())
        for switch in switches:
            switch.throw()
        return bool(switches)

    def predicted_ttft_seconds(self, num_tokens: int) -> float:
        """When a request of so many tokens would see its first one; zero when nothing is known."""
        wait = self.outlook.wait_seconds(self.admission.queue, num_tokens)
        return wait + self.outlook.alone_seconds(num_tokens)

    async def stop(self) -> None:
        """Ends heartbeats and waits until the last leases are given back."""
        await self._leases.stop()
        await self._background.stop()

    async def _run(
        self,
        request: RouterRequest,
        deadline: float | None,
        span: RequestSpan,
        watch: Stopwatch,
    ) -> AsyncGenerator[TextEvent, None]:
        asked = self.objectives.of(request.objective_class)
        self._check_engines()
        prompt = await self.model.encode(request.prompt)
        sampling = _with_seed(self.model.fit(len(prompt), request.sampling))
        self._describe(span, request, prompt)
        preparation = self._preparation(request, prompt, sampling, asked.objective, deadline)
        span.event("queued", waiting_requests=self.admission.num_waiting)
        lease, expectation = await self._admitted(preparation, asked, watch)
        span.event("reserved", cached_tokens=lease.cached_tokens, lease_id=lease.id)
        first_token = ExitStack()
        try:
            first_token.enter_context(
                self.outlook.awaiting_first_token(
                    preparation.num_prompt_tokens - lease.cached_tokens, preparation.max_tokens
                )
            )
            async with aclosing(preparation.first(lease, may_extend=request.n == 1)) as steps:
                async for step in steps:
                    if isinstance(step, float):
                        yield TextEvent("", prefill_progress=step)
                    else:
                        lease = step
            if lease.prefilled_tokens:
                watch.prefilled()
                span.event("handed_over", prefilled_tokens=lease.prefilled_tokens)
            else:
                span.event("left_to_decode")
            leases = [lease, *await preparation.forks(lease, request.n - 1)]
            branches = [
                self._branch(i, each, lease.cached_tokens, request, sampling, preparation, watch)
                for i, each in enumerate(leases)
            ]
            async with aclosing(merge([branch.events() for branch in branches])) as events:
                is_first = True
                async for event in events:
                    if is_first:
                        expectation.met(watch.held_seconds())
                        first_token.close()
                        span.event("first_token")
                        is_first = False
                    self._count(event, asked, request, span)
                    yield event
        finally:
            first_token.close()
            preparation.close()
            self.admission.leave(watch.held_seconds())

    async def _admitted(
        self, preparation: Preparation, asked: Attainment, watch: Stopwatch
    ) -> tuple[Lease, Expectation]:
        """Waits for a place and a lease. Raises ResourceError when that would take too long."""
        try:
            self._shedding.check_arrival(asked.objective, preparation.num_prompt_tokens)
            lease = await preparation.admitted()
            watch.admitted()
            num_new = preparation.num_prompt_tokens - lease.cached_tokens
            try:
                waited = watch.queue_seconds()
                expectation = self._shedding.check_place(asked.objective, waited, num_new)
            except OverloadedError:
                preparation.close()
                self.admission.leave(None)
                raise
        except ResourceError:
            asked.shed()
            raise
        return lease, expectation

    def _preparation(
        self,
        request: RouterRequest,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        objective: Objective,
        deadline: float | None,
    ) -> Preparation:
        assert sampling.max_tokens is not None  # ServedModel.fit fills it in
        return Preparation(
            name=request.request_id,
            prompt=prompt,
            max_tokens=sampling.max_tokens,
            priority=request.priority,
            deadline=deadline,
            prefill=self.prefill,
            decode=self.decode,
            admission=self.admission,
            leases=self._leases,
            background=self._background,
            recovery=self._recovery(request, deadline),
            outlook=self.outlook,
            objective=objective,
        )

    def _branch(
        self,
        index: int,
        lease: Lease | None,
        cached_tokens: int,
        request: RouterRequest,
        sampling: SamplingParams,
        preparation: Preparation,
        watch: Stopwatch,
    ) -> Branch:
        assert sampling.seed is not None
        # Each answer has draws of its own.
        seed = (sampling.seed + index) % 2**64
        return Branch(
            index,
            lease,
            cached_tokens,
            Answer(request, self.model.tokenizer),
            self._metrics,
            dataclasses.replace(sampling, seed=seed),
            preparation,
            self._recovery(request, preparation.deadline),
            watch,
        )

    def _recovery(self, request: RouterRequest, deadline: float | None) -> Recovery:
        return Recovery(request.request_id, self.engines, self._recovery_seconds, deadline)

    def _describe(self, span: RequestSpan, request: RouterRequest, prompt: tuple[int, ...]) -> None:
        operation = operation_of(request.prompt)
        span.asked(request.request_id, operation, self.model.name, request.sampling, request.n)
        span.event("tokenized", prompt_tokens=len(prompt))
        if span.records_content:
            span.prompt(self.model.readable(request.prompt))

    def _count(
        self, event: TextEvent, asked: Attainment, request: RouterRequest, span: RequestSpan
    ) -> None:
        self.generated_tokens.add(len(event.tokens))
        if span.records_content:
            span.tokens(event.index, [token.id for token in event.tokens])
        if event.finish_reason is not None and event.usage is not None and event.timings:
            operation = operation_of(request.prompt)
            self._metrics.answered(operation, event.finish_reason, event.usage, event.timings)
            span.answered(event.index, event.finish_reason, event.usage, event.timings)
            self.recent.add(event.usage, event.timings)
            asked.finished(event.usage, event.timings)

    def _check_engines(self) -> None:
        """Fails at once, and by name, instead of after a time-out."""
        for engine in self.engines:
            if not engine.is_serving:
                raise UnavailableError(
                    f"{engine.name} at {engine.address} is not serving: it is starting, loading "
                    "or stopped; try again later"
                )

    def _forget(self, request_id: str, switch: AbortSwitch) -> None:
        switches = self._switches[request_id]
        switches.discard(switch)
        if not switches:
            del self._switches[request_id]


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """A request goes on after a loss with the same draws, so its seed must be known here."""
    if sampling.seed is not None:
        return sampling
    return dataclasses.replace(sampling, seed=secrets.randbits(64))
