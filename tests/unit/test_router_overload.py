"""The router at ten times its capacity: what it admits is served in time, the rest refused at once.

Time is made up: when nobody has anything to do, the clock jumps to the next thing that is due. So
what is measured is the router's choice and not the speed of the machine, and it always comes out
alike.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from headwater.costs import PassCosts
from headwater.errors import ResourceError
from headwater.generation import FinishReason, SamplingParams, Token, TokenEvent
from headwater.services.router.core import RouterCore
from headwater.services.router.engines import Lease
from headwater.services.router.objectives import Objectives
from headwater.services.router.outlook import Outlook
from headwater.services.router.policy import DecodeLoad, PrefillLoad
from headwater.services.router.requests import RouterRequest, TokenPrompt
from headwater.services.router.served_model import ServedModel
from tests.unit.router_fakes import MODEL_DIR, FakeDecode, FakePrefill

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

SEED = 11
PROMPT_TOKENS = 40
TOKEN_SECONDS = 0.0005  # prefill, one prompt after the other: 50 prompts per second
STEP_SECONDS = 0.02
NUM_TOKENS = 5
BATCH = 2  # two answers of 0.1 s each at a time: 20 per second, which is what limits
CAPACITY = 20.0
TTFT_SECONDS = 0.5
DURATION_SECONDS = 6.0


class JumpingClock(selectors.DefaultSelector):
    """A clock, and the place where an event loop waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for ever"
        self.now += max(0.0, timeout)
        return super().select(0)


class TimedPrefill(FakePrefill):
    def __init__(self, slowness: float) -> None:
        super().__init__()
        self._token_seconds = slowness * TOKEN_SECONDS
        self._one = asyncio.Lock()

    async def prefill(
        self,
        request_id: str,
        token_ids: Sequence[int],
        lease: Lease,
        priority: int,
        deadline: float | None,
    ) -> AsyncGenerator[float, None]:
        async with self._one:
            await asyncio.sleep(self._token_seconds * (len(token_ids) - lease.cached_tokens))
        yield 1.0


class TimedDecode(FakeDecode):
    def __init__(self, slowness: float) -> None:
        super().__init__()
        self._step_seconds = slowness * STEP_SECONDS
        self._places = asyncio.Semaphore(BATCH)

    async def generate(
        self,
        request_id: str,
        lease: Lease,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int,
        tpot_seconds: float,
        deadline: float | None,
    ) -> AsyncGenerator[TokenEvent, None]:
        async with self._places:
            for position in range(NUM_TOKENS):
                await asyncio.sleep(self._step_seconds)
                is_last = position == NUM_TOKENS - 1
                yield TokenEvent((Token(5),), FinishReason.LENGTH if is_last else None)


class Load:
    """A core on timed engines, and what became of the requests to it.

    The engines take `slowness` times as long as they say.
    """

    def __init__(self, max_running: int, slowness: float) -> None:
        outlook = Outlook()
        outlook.told(PrefillLoad(PassCosts(1e-6, TOKEN_SECONDS, 9, 64)))
        outlook.told(DecodeLoad(STEP_SECONDS, PassCosts(10.0, 1.0, 9, 64), batch_limit=BATCH))
        self.core = RouterCore(
            model=ServedModel.load(MODEL_DIR, "tiny"),
            prefill=TimedPrefill(slowness),
            decode=TimedDecode(slowness),
            objectives=Objectives(f"interactive={TTFT_SECONDS}/1", "interactive"),
            outlook=outlook,
            max_running=max_running,
            max_waiting=256,
            shed_factor=0.8,
        )
        self.outcomes: Counter[str] = Counter()
        self.retry_after_ms: list[int] = []
        self.longest_line = 0

    async def ask(self) -> None:
        request = RouterRequest(TokenPrompt((5,) * PROMPT_TOKENS), wants_text=False)
        try:
            async with aclosing(self.core.generate(request)) as events:
                async for event in events:
                    if event.timings is not None:
                        ttft = event.timings.time_to_first_token_seconds
                        self.outcomes["good" if ttft <= TTFT_SECONDS else "late"] += 1
        except ResourceError as error:
            self.outcomes["refused"] += 1
            self.retry_after_ms.append(error.retry_after_ms)

    async def run(self, rate: float, seconds: float) -> float:
        """Requests arrive at random, `rate` per second; returns good ones per second."""
        draw = random.Random(SEED)
        began_at = now = time.monotonic()
        tasks = []
        while now < began_at + seconds:
            tasks.append(asyncio.create_task(self.ask()))
            now += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, now - time.monotonic()))
            admission = self.core.admission
            self.longest_line = max(
                self.longest_line, admission.num_running + admission.num_waiting
            )
        await asyncio.gather(*tasks)
        good = self.outcomes["good"] / (time.monotonic() - began_at)
        await self.core.stop()
        return good


async def compare(max_running: int, slowness: float) -> tuple[float, Load, float, Load]:
    """Goodput at the capacity and at ten times of it."""
    peak, overload = Load(max_running, slowness), Load(max_running, slowness)
    capacity = CAPACITY / slowness
    peak_goodput = await peak.run(capacity, DURATION_SECONDS)
    return peak_goodput, peak, await overload.run(10 * capacity, DURATION_SECONDS), overload


@pytest.mark.parametrize(
    ("max_running", "slowness"),
    [
        # Requests wait in decode, for a place in the batch.
        (64, 1.0),
        # They wait in the router.
        (BATCH + 1, 1.0),
        # What the engines have measured is far from what they do now.
        (64, 3.0),
        (64, 0.3),
    ],
)
def test_goodput_at_ten_times_the_capacity(
    monkeypatch: pytest.MonkeyPatch, max_running: int, slowness: float
) -> None:
    print(f"seed {SEED}")
    clock = JumpingClock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        peak_goodput, peak, goodput, overload = runner.run(compare(max_running, slowness))
    print(f"peak {peak_goodput:.1f}/s {peak.outcomes}, overload {goodput:.1f}/s")
    print(f"{overload.outcomes}, at most {overload.longest_line} in the router")
    assert goodput >= 0.9 * peak_goodput
    assert goodput >= 0.85 * CAPACITY / slowness
    # A line as long as the objective allows, whatever arrives.
    assert overload.longest_line <= TTFT_SECONDS * CAPACITY / slowness + 2 * BATCH
    assert overload.outcomes["late"] <= 0.1 * overload.outcomes["good"]
    assert overload.outcomes["refused"] >= 0.8 * sum(overload.outcomes.values())
    assert min(overload.retry_after_ms) >= 100
    [attainment] = overload.core.objectives.all
    assert attainment.num_shed == overload.outcomes["refused"]
    assert attainment.num_attained == overload.outcomes["good"]
