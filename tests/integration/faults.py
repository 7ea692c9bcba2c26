"""Breaks one process of a live stack at a chosen stage of a request, and checks what must hold.

A request under way elsewhere, and the one at the stage, must get every token exactly once, the ones
they get when nothing breaks. Only when the router itself, or the line to it, is lost may they end
early, with UNAVAILABLE. Afterwards no lease, block or segment is left over.

How a stage is caught: proxies between the processes hold the message that would end it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwater.client import Client
from headwater.errors import HeadwaterError, UnavailableError
from headwater.generation import SamplingParams
from headwater.rpc.channel import open_channel
from headwater.shm import list_segments
from headwater.v1 import decode_service_pb2, decode_service_pb2_grpc
from tests.integration.proxy import DATA, HEADERS, Proxy

if TYPE_CHECKING:
    from tests.integration.stack import Stack

VICTIMS = ("prefill", "decode", "router")
STAGES = ("reserving", "prefill", "hand-over", "decoding", "streaming")
FAULTS = ("kill", "stop", "cut")
# Which lines end at which process.
LINES = {
    "prefill": ("router-prefill", "prefill-decode"),
    "decode": ("router-decode", "prefill-decode"),
    "router": ("client-router", "router-prefill", "router-decode"),
}
# Settings of the stack: leases that nobody renews are to end soon, prompts to take many passes.
SETTINGS = (
    "kv.lease_ttl_ms=2000",
    "prefill.chunk_tokens=16",
    "kv.pool_tokens=16384",
    # A stop makes requests late, and refusing the next ones would be right, but hide the rest.
    "objectives.shed_factor=0",
)
LIMIT_SECONDS = 90.0
# The longest that a lease, or a writer of its blocks, may outlive the fault.
CLEAN_SECONDS = 20.0
_FIRST_TOKENS = 3
_FURTHER_TOKENS = 40
_PROMPT_TOKENS = 600
NUM_QUESTIONS = 4

Answer = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be broken, and when, and how."""

    victim: str
    stage: str
    fault: str


@dataclass(slots=True)
class Report:
    """What happened: how the request at the stage ended, and after how long; times in seconds."""

    victim: str
    stage: str
    fault: str
    outcome: str
    seconds: float
    restart_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_plans(count: int, seed: int) -> list[Plan]:
    """`count` plans in random order; each combination comes up before any comes up again."""
    draw = random.Random(seed)
    plans: list[Plan] = []
    while len(plans) < count:
        every = [Plan(*parts) for parts in itertools.product(VICTIMS, STAGES, FAULTS)]
        draw.shuffle(every)
        plans += every
    return plans[:count]


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the answer that it gets when nothing breaks."""

    prompt: tuple[int, ...]
    params: SamplingParams
    expected: Answer


class Listener:
    """Somebody who asks a question and notes what comes.

    `may_leave`: hang up when the fault is over and some more tokens have come.
    """

    def __init__(self, question: Question, *, may_leave: asyncio.Event | None = None) -> None:
        self.question = question
        self.answer: Answer = []
        self.has_tokens = asyncio.Event()
        self._may_leave = may_leave

    async def ask(self, address: str) -> str:
        """Returns "completed", "left", or the reason of the error that ended the answer."""
        until: int | None = None
        try:
            async with (
                Client(address) as client,
                aclosing(client.generate(self.question.prompt, self.question.params)) as events,
            ):
                async for event in events:
                    self.answer += [(token.id, token.logprob or 0.0) for token in event.tokens]
                    if len(self.answer) >= _FIRST_TOKENS:
                        self.has_tokens.set()
                    if until is None and self._may_leave is not None and self._may_leave.is_set():
                        until = len(self.answer) + _FURTHER_TOKENS
                    if until is not None and len(self.answer) >= until:
                        return "left"
        except HeadwaterError as error:
            return error.reason()
        finally:
            self.has_tokens.set()
        return "completed"

    def check(self, outcome: str, *, may_be_lost: bool) -> None:
        """Raises AssertionError unless every token came once, and all of them where they must."""
        expected = self.question.expected
        assert self.answer == expected[: len(self.answer)], "a token was lost, repeated or wrong"
        if outcome == "completed":
            assert len(self.answer) == len(expected), f"{len(self.answer)} tokens came"
        elif outcome != "left":
            assert may_be_lost, f"the request ended with {outcome}"
            assert outcome == UnavailableError.reason()


class FaultBench:
    """A stack with a proxy on each of its lines; use it as an asynchronous context manager."""

    def __init__(self, stack: Stack, shm_prefix: str, *, seed: int, stop_seconds: float) -> None:
        self._stack = stack
        self._shm_prefix = shm_prefix
        self._draw = random.Random(seed)
        self._stop_seconds = stop_seconds
        self._lines = {
            "client-router": Proxy(stack.addresses["router"]),
            "router-prefill": Proxy(stack.addresses["prefill"]),
            "router-decode": Proxy(stack.addresses["decode"]),
            "prefill-decode": Proxy(stack.addresses["decode"]),
        }
        self._questions: list[Question] = []

    async def __aenter__(self) -> FaultBench:
        for line in self._lines.values():
            await line.start()
        self._stack.override(
            f"router.prefill_address={self._lines['router-prefill'].address}",
            f"router.decode_address={self._lines['router-decode'].address}",
            f"prefill.decode_address={self._lines['prefill-decode'].address}",
        )
        await asyncio.to_thread(self._stack.start)
        draw = random.Random(1)
        for i in range(NUM_QUESTIONS):
            await self._learn(draw, _PROMPT_TOKENS, i, max_tokens=150)
        await self._learn(draw, 30, NUM_QUESTIONS, max_tokens=3000)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._stack.processes.values():
            process.send_signal(signal.SIGCONT)
        for line in self._lines.values():
            line.release()
        await asyncio.to_thread(self._stack.stop)
        for line in self._lines.values():
            await line.close()

    async def run(self, plan: Plan) -> Report:
        """One plan. Raises AssertionError, or TimeoutError when something hangs."""
        started_at = time.monotonic()
        address = self._lines["client-router"].address
        is_over = asyncio.Event()
        # Somebody whose answer is under way the whole time.
        bystander = Listener(self._questions[-1], may_leave=is_over)
        listener = Listener(self._draw.choice(self._questions[:-1]))
        async with asyncio.timeout(LIMIT_SECONDS + 3 * self._stop_seconds):
            other = asyncio.create_task(bystander.ask(address))
            await bystander.has_tokens.wait()
            self._arm(plan.stage)
            request = asyncio.create_task(listener.ask(address))
            await self._reach(plan.stage, listener, request)
            restart_seconds = await self._break(plan)
            is_over.set()
            outcome = await request
            may_be_lost = plan.victim == "router" and plan.fault != "stop"
            listener.check(outcome, may_be_lost=may_be_lost)
            bystander.check(await other, may_be_lost=may_be_lost)
            await self._until_nothing_is_left()
        return Report(
            plan.victim,
            plan.stage,
            plan.fault,
            outcome,
            time.monotonic() - started_at,
            restart_seconds,
        )

    async def _learn(
        self, draw: random.Random, prompt_tokens: int, i: int, *, max_tokens: int
    ) -> None:
        """What a request gets when nothing breaks."""
        prompt = tuple(draw.randrange(256) for _ in range(prompt_tokens))
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True, logprobs=0
        )
        listener = Listener(Question(prompt, params, []))
        outcome = await listener.ask(self._lines["client-router"].address)
        assert outcome == "completed", outcome
        self._questions.append(Question(prompt, params, listener.answer))

    def _arm(self, stage: str) -> None:
        """Has the message held that would end the stage of the request sent next."""
        if stage == "reserving":
            self._lines["router-decode"].requests.hold(HEADERS)
        elif stage == "prefill":
            self._lines["router-prefill"].replies.hold(DATA)
        elif stage == "hand-over":
            # The first call is for the lease, the next one for the tokens.
            self._lines["router-decode"].requests.hold(HEADERS, skip=1)

    async def _reach(self, stage: str, listener: Listener, request: asyncio.Task[str]) -> None:
        """Returns when the request is at the stage."""
        if stage in ("decoding", "streaming"):
            reached = listener.has_tokens
            await reached.wait()
        if stage == "decoding":
            return
        if stage == "streaming":
            replies = self._lines["client-router"].replies
            replies.hold(DATA)
            reached = replies.held
        elif stage == "prefill":
            reached = self._lines["router-prefill"].replies.held
        else:
            reached = self._lines["router-decode"].requests.held
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait((waiting, request), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert reached.is_set(), f"the request was over before the stage {stage}"
        if stage == "prefill":
            # In the midst of its layers, for as long as the fault takes.
            self._signal("prefill", signal.SIGSTOP)

    async def _break(self, plan: Plan) -> float | None:
        """The fault; returns how long a restart took, in seconds."""
        if plan.fault == "kill":
            self._stack.kill(plan.victim)
            self._stack.spawn(plan.victim)
            self._let_go()
            started_at = time.monotonic()
            await asyncio.to_thread(self._stack.wait_until_serving, plan.victim)
            return time.monotonic() - started_at
        if plan.fault == "stop":
            self._signal(plan.victim, signal.SIGSTOP)
            if plan.victim != "prefill":
                self._let_go()
            await asyncio.sleep(self._stop_seconds)
            self._signal(plan.victim, signal.SIGCONT)
        else:
            for name in LINES[plan.victim]:
                self._lines[name].cut()
        self._let_go()
        return None

    def _let_go(self) -> None:
        self._signal("prefill", signal.SIGCONT)
        for line in self._lines.values():
            line.release()

    def _signal(self, name: str, number: int) -> None:
        self._stack.processes[name].send_signal(number)

    async def _until_nothing_is_left(self) -> None:
        """Returns when all serve, and no lease, block or segment is left over."""
        for name in VICTIMS:
            process = self._stack.processes[name]
            assert process.poll() is None, f"{name} ended\n{self._stack.log(name)}"
            await asyncio.to_thread(self._stack.wait_until_serving, name)
        async with open_channel(self._stack.addresses["decode"]) as channel:
            stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
            give_up = time.monotonic() + CLEAN_SECONDS
            while True:
                status = await stub.GetStatus(decode_service_pb2.GetDecodeStatusRequest())
                num_used = status.kv_layout.num_blocks - status.kv_free_blocks
                if not (status.kv_leases or num_used or status.running_requests):
                    break
                assert time.monotonic() < give_up, f"left over:\n{status}"
                await asyncio.sleep(0.02)
        kinds = sorted(s.name.split(".")[1] for s in list_segments(f"{self._shm_prefix}."))
        assert kinds == ["kv", "weights"], kinds
        for name in VICTIMS:
            assert "Traceback" not in self._stack.log(name), self._stack.log(name)
