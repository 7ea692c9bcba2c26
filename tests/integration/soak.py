"""Random mixed load on a live stack, and whether anything grows that should not.

The load comes in rounds. After each round the stack must be empty: no lease, every block free;
then memory, file descriptors and threads of each process are noted. Callers hang up, wait too
briefly and ask for nonsense; each of them must get what fits, and nobody an internal error.
"""

from __future__ import annotations

import asyncio
import collections
import random
import statistics
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.client import Client
from headwater.errors import HeadwaterError
from headwater.generation import Constraint, SamplingParams
from headwater.rpc.channel import open_channel
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    memory_service_pb2,
    memory_service_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.integration.stack import Stack

# A pool and a line that are too short for the load, so that both overflow again and again.
SETTINGS = (
    "kv.pool_tokens=2048",
    "kv.lease_ttl_ms=5000",
    "decode.max_batch=8",
    "router.max_running_requests=12",
    "router.max_waiting_requests=2",
)
NUM_CALLERS = 16
_VOCAB = 256
_EMPTY_SECONDS = 30.0
_FIELDS = ("private_kib", "file_descriptors", "threads")
# Reasons that are no fault of the stack's, by what was asked for.
_OVERLOAD = frozenset({"QUEUE_FULL", "KV_EXHAUSTED", "RESOURCE", "OVERLOADED"})
_REFUSALS = frozenset({"INVALID_REQUEST", "PROMPT_TOO_LONG"})


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds of the machine; shared memory is counted elsewhere."""

    private_kib: int
    file_descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """As the kernel tells."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return cls(
            private_kib=int(fields["RssAnon"][0]),
            file_descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            threads=int(fields["Threads"][0]),
        )


def growth(history: Sequence[Footprint]) -> dict[str, float]:
    """What a process holds at the end over what it held at first; medians of a third each.

    The first third of all rounds is warming up and does not count.
    """
    third = max(1, len(history) // 3)
    early, late = history[third : 2 * third] or history[:1], history[-third:]
    first = {field: statistics.median(getattr(f, field) for f in early) for field in _FIELDS}
    last = {field: statistics.median(getattr(f, field) for f in late) for field in _FIELDS}
    return {field: last[field] - first[field] for field in _FIELDS}


class Soak:
    """One soak; `outcomes` counts how requests of each kind ended."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._draw = random.Random(seed)
        self._shared = tuple(self._draw.randrange(_VOCAB) for _ in range(160))
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.footprints: list[dict[str, Footprint]] = []
        self.errors: list[str] = []

    async def run(self, seconds: float, round_seconds: float) -> None:
        """Rounds until the time is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            until = min(time.monotonic() + round_seconds, end)
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_CALLERS):
                    group.create_task(self._call_until(until))
            await self._until_empty()
            self.footprints.append(
                {name: Footprint.of(each.pid) for name, each in self._stack.processes.items()}
            )

    def growth(self, name: str) -> dict[str, float]:
        """What a process holds at the end over what it held at first."""
        return growth([each[name] for each in self.footprints])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "outcomes": {f"{kind}: {how}": n for (kind, how), n in sorted(self.outcomes.items())},
            "errors": self.errors,
            "growth": {name: self.growth(name) for name in self._stack.processes},
            "footprints": [
                {name: asdict(footprint) for name, footprint in each.items()}
                for each in self.footprints
            ],
        }

    async def _call_until(self, end: float) -> None:
        kinds: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "answer": (60, self._answer),
            "hang up": (15, self._hang_up),
            "deadline": (6, self._deadline),
            "bad": (9, self._bad),
            "structured": (5, self._structured),
            "chat": (5, self._chat),
            "flush": (1, self._flush),
        }
        names = list(kinds)
        while time.monotonic() < end:
            name = self._draw.choices(names, [kinds[each][0] for each in names])[0]
            how = await kinds[name][1]()
            self.outcomes[name, how] += 1

    async def _until_empty(self) -> None:
        """Returns when nothing is held; raises AssertionError when something stays."""
        give_up = time.monotonic() + _EMPTY_SECONDS
        async with open_channel(self._stack.addresses["decode"]) as channel:
            stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
            while True:
                status = await stub.GetStatus(decode_service_pb2.GetDecodeStatusRequest())
                is_free = status.kv_free_blocks == status.kv_layout.num_blocks
                if is_free and not (status.kv_leases or status.running_requests):
                    return
                assert time.monotonic() < give_up, f"left over:\n{status}"
                await asyncio.sleep(0.02)

    def _prompt(self) -> tuple[int, ...]:
        shared = self._shared[: self._draw.choice((0, 0, 32, 100, 160))]
        own = self._draw.randrange(1, 200)
        return (*shared, *(self._draw.randrange(_VOCAB) for _ in range(own)))

    def _params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self._draw.choice((0.0, 0.7, 1.0)),
            top_p=self._draw.choice((1.0, 0.9)),
            max_tokens=self._draw.randrange(1, 60),
            ignore_eos=self._draw.random() < 0.7,
            logprobs=self._draw.choice((None, 0, 3)),
            stop=self._draw.choice(((), ("ab", "x"))),
        )

    async def _ask(
        self,
        prompt: str | tuple[int, ...],
        params: SamplingParams,
        *,
        leave_after: int | None = None,
        timeout_seconds: float | None = None,
        may_end: frozenset[str] = frozenset(),
    ) -> str:
        """Returns "done", "left", or the reason of an error that may happen; notes all others."""
        seen = 0
        try:
            async with (
                Client(self._stack.addresses["router"]) as client,
                aclosing(
                    client.generate(prompt, params, timeout_seconds=timeout_seconds)
                ) as events,
            ):
                async for event in events:
                    seen += len(event.tokens)
                    if leave_after is not None and seen >= leave_after:
                        return "left"
        except HeadwaterError as error:
            if error.reason() not in _OVERLOAD | may_end:
                self.errors.append(f"{error.reason()}: {error}")
            return error.reason()
        return "done"

    async def _answer(self) -> str:
        return await self._ask(self._prompt(), self._params())

    async def _hang_up(self) -> str:
        # After no token it leaves at the first sign of life, the progress of its prompt.
        return await self._ask(
            self._prompt(), self._params(), leave_after=self._draw.randrange(0, 20)
        )

    async def _deadline(self) -> str:
        seconds = self._draw.choice((0.001, 0.01, 0.05))
        may_end = frozenset({"DEADLINE"})
        return await self._ask(
            self._prompt(), self._params(), timeout_seconds=seconds, may_end=may_end
        )

    async def _bad(self) -> str:
        prompt, params = self._draw.choice(
            (
                ("", SamplingParams(max_tokens=3)),
                ((), SamplingParams(max_tokens=3)),
                ((10**6,), SamplingParams(max_tokens=3)),
                ((1,) * 600, SamplingParams(max_tokens=3)),
                ((1, 2), SamplingParams(max_tokens=10**6)),
                ((1, 2), SamplingParams(max_tokens=3, logit_bias={10**6: 1.0})),
                ((1, 2), SamplingParams(max_tokens=3, constraint=Constraint("regex", "((("))),
                ((1, 2), SamplingParams(max_tokens=3, constraint=Constraint("json_schema", "{"))),
            )
        )
        how = await self._ask(prompt, params, may_end=_REFUSALS)
        if how == "done":
            self.errors.append(f"nonsense was answered: {prompt!r:.60}, {params}")
        return how

    async def _structured(self) -> str:
        constraint = self._draw.choice(
            (Constraint("regex", "[a-c]{3,9}"), Constraint("choice", '["red", "green"]'))
        )
        params = SamplingParams(temperature=1.0, max_tokens=20, constraint=constraint)
        return await self._ask("x", params)

    async def _chat(self) -> str:
        try:
            async with Client(self._stack.addresses["router"]) as client:
                turns = [("user", "Hello"), ("assistant", "Yes?"), ("user", "And now?")]
                async for _ in client.chat(turns, self._params()):
                    pass
        except HeadwaterError as error:
            if error.reason() not in _OVERLOAD:
                self.errors.append(f"{error.reason()}: {error}")
            return error.reason()
        return "done"

    async def _flush(self) -> str:
        async with open_channel(self._stack.addresses["decode"]) as channel:
            stub = memory_service_pb2_grpc.MemoryServiceStub(channel)
            await stub.FlushKv(memory_service_pb2.FlushKvRequest())
        return "done"
