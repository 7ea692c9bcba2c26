"""Gets a request's prompt computed, first and again: lease, path, prefill, fork.

Knows how the engines are used for one request; what comes out of them is the branches' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from headwater.errors import HeadwaterError, UnavailableError
from headwater.services.router.engines import Lease
from headwater.services.router.policy import PromptPath
from headwater.telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Sequence

    from headwater.generation import SamplingParams, TokenEvent
    from headwater.objectives import Objective
    from headwater.services.router.admission import Admission
    from headwater.services.router.engines import DecodeEngine, PrefillEngine
    from headwater.services.router.leases import LeaseKeeper
    from headwater.services.router.outlook import Outlook
    from headwater.services.router.recovery import Recovery

logger = logging.getLogger(__name__)


class Background:
    """Work that goes on beyond the end, or the cancellation, of the request it belongs to."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work`, which raises nothing."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Waits until all is done."""
        if self._tasks:
            await asyncio.wait(self._tasks)


@dataclasses.dataclass(slots=True)
class Preparation:
    """The engines' work for one prompt of `name`."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    deadline: float | None
    prefill: PrefillEngine
    decode: DecodeEngine
    admission: Admission
    leases: LeaseKeeper
    background: Background
    recovery: Recovery
    outlook: Outlook
    objective: Objective
    _open: dict[tuple[int, int], Lease] = dataclasses.field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    async def admitted(self) -> Lease:
        """Waits for a place and for KV blocks; the caller leaves the admission at the end."""
        with span("router.queue"):
            return await self.admission.enter(self._reserve_prompt_at_last, self.deadline)

    async def first(self, lease: Lease, *, may_extend: bool) -> AsyncGenerator[float | Lease, None]:
        """Yields the share of the prompt done, in [0, 1], and at last the lease to generate from.

        With `may_extend` the prompt may be left to decode.
        """
        while True:
            try:
                async with aclosing(self._compute(lease, may_extend=may_extend)) as steps:
                    async for step in steps:
                        yield step
                return
            except UnavailableError as lost:
                await self.recovery.wait(lost)
                lease = await self.admission.room(self._reserve_prompt, self.deadline)

    async def again(self, output: Sequence[int]) -> Lease:
        """A new lease that holds the prompt and what was answered so far.

        Raises UnavailableError when an engine is lost, again.
        """
        tokens = (*self.prompt, *output)

        async def reserve() -> Lease:
            return await self._reserve(tokens, self.max_tokens - len(output))

        lease = await self.admission.room(reserve, self.deadline)
        async with aclosing(self._compute(lease, may_extend=True)) as steps:
            async for step in steps:
                if isinstance(step, Lease):
                    lease = step
        return lease

    async def forks(self, lease: Lease, count: int) -> list[Lease | None]:
        """`count` more leases on the prefilled prompt; None where decode was lost instead."""

        async def fork() -> Lease:
            return await self.decode.fork(lease, self.num_prompt_tokens, self.deadline)

        forks: list[Lease | None] = []
        for _ in range(count):
            try:
                found = await self.admission.room(fork, self.deadline)
            except UnavailableError as lost:
                logger.warning("request %s goes on without a fork: %s", self.name, lost)
                forks.append(None)
            else:
                found = dataclasses.replace(found, prefilled_tokens=lease.prefilled_tokens)
                forks.append(self._opened(found))
        return forks

    async def generate(
        self, lease: Lease, sampling: SamplingParams, output: Sequence[int]
    ) -> AsyncGenerator[TokenEvent, None]:
        """The tokens that follow prompt and output."""
        # Stop strings are matched in the router; the decode engine refuses them.
        plain = dataclasses.replace(sampling, stop=(), include_stop=False)
        tpot_seconds = self.objective.tpot_seconds
        with contextlib.ExitStack() as stage:
            pending = None
            if not lease.prefilled_tokens:
                num_new = self.num_prompt_tokens + len(output) - lease.cached_tokens
                pending = stage.enter_context(self.outlook.computing(PromptPath.EXTEND, num_new))
            events = self.decode.generate(
                self.name,
                lease,
                self.prompt,
                tuple(output),
                plain,
                self.priority,
                tpot_seconds,
                self.deadline,
            )
            is_streaming = False
            async with aclosing(events):
                async for event in events:
                    if not is_streaming:
                        is_streaming = True
                        if pending is not None:
                            pending.done()
                        stage.close()
                        stage.enter_context(self.outlook.streaming(tpot_seconds))
                    yield event

    def ended(self, lease: Lease) -> None:
        """Notes that decode has ended a lease itself."""
        self._open.pop((lease.epoch, lease.id), None)

    def give_back(self, lease: Lease) -> None:
        """Ends a lease, in the background; once."""
        if self._open.pop((lease.epoch, lease.id), None) is not None:
            self.background.spawn(self._release(lease))

    def close(self) -> None:
        """Gives back all leases that are left."""
        for lease in list(self._open.values()):
            self.give_back(lease)

    def _opened(self, lease: Lease) -> Lease:
        self._open[lease.epoch, lease.id] = lease
        return lease

    async def _compute(
        self, lease: Lease, *, may_extend: bool
    ) -> AsyncGenerator[float | Lease, None]:
        """Has the prompt computed unless decode is to do it; see `first`.

        An answer so far is decode's in any case: it computed it token by token, and other kernels
        would give other bits.
        """
        num_new = self.num_prompt_tokens - lease.cached_tokens
        if num_new <= 0 or (may_extend and self.outlook.choose(num_new) is PromptPath.EXTEND):
            yield lease
            return
        with self.outlook.computing(PromptPath.PREFILL, num_new) as pending:
            async with aclosing(self._prefill(lease)) as shares:
                async for share in shares:
                    pending.progressed(share)
                    yield share
            pending.done()
        yield dataclasses.replace(lease, prefilled_tokens=self.num_prompt_tokens)

    async def _prefill(self, lease: Lease) -> AsyncGenerator[float, None]:
        is_done = False
        try:
            with self.leases.keeping(lease):
                async with aclosing(
                    self.prefill.prefill(
                        self.name, self.prompt, lease, self.priority, self.deadline
                    )
                ) as shares:
                    async for share in shares:
                        self.recovery.progressed()
                        yield share
            is_done = True
        finally:
            if not is_done:
                self.give_back(lease)

    async def _reserve_prompt_at_last(self) -> Lease:
        """Waits for a lost engine at the head of the line, since nobody else could do better."""
        while True:
            try:
                lease = await self._reserve_prompt()
            except UnavailableError as lost:
                await self.recovery.wait(lost)
            else:
                self.recovery.progressed()
                return lease

    async def _reserve_prompt(self) -> Lease:
        return await self._reserve(self.prompt, self.max_tokens)

    async def _reserve(self, tokens: Sequence[int], max_new_tokens: int) -> Lease:
        call = asyncio.ensure_future(
            self.decode.reserve(self.name, tokens, max_new_tokens, self.deadline)
        )
        try:
            return self._opened(await asyncio.shield(call))
        except asyncio.CancelledError:
            # The lease may have been granted by now, and then nobody else would return it.
            self.background.spawn(self._release_when_granted(call))
            raise

    async def _release_when_granted(self, call: asyncio.Future[Lease]) -> None:
        with contextlib.suppress(HeadwaterError):
            await self._release(await call)

    async def _release(self, lease: Lease) -> None:
        try:
            await self.decode.release(lease.epoch, [lease.id])
        except HeadwaterError as error:
            # Its time to live runs out by itself.
            logger.warning("lease %d was not given back: %s", lease.id, error)
