"""Rounds of attacks on a live stack, and whether it is the same after each of them.

After a round nothing may be held (no lease, no block, no request), every process must live, have
logged no failure of its own, and good requests must have the answers that they had at first; during
it they go along. What processes hold of the machine is noted, for whoever looks at growth.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import random
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc

from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
)
from tests.fuzz.attacks import Attacker
from tests.fuzz.targets import GOOD_TOKENS, good_requests
from tests.fuzz.trickle import trickling
from tests.integration.soak import Footprint, growth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.stack import Stack

# Leases that an attack leaves behind end soon.
SETTINGS = ("kv.lease_ttl_ms=2000", "router.prompt_path=auto", "router.max_waiting_requests=8")
_NUM_ATTACKERS = 6
_HUNG_SECONDS = 30.0
_EMPTY_SECONDS = 20.0
_MAX_COMPLAINTS = 50
WEIGHTS = {
    "message": 20,
    "fields": 30,
    "broken": 20,
    "lease": 15,
    "oversized": 2,
    "unknown": 3,
    "connection": 25,
}
_REQUESTS = good_requests()
# Good requests may find the stack full, but nothing else.
_BUSY = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED})


class Fuzz:
    """One fuzzing of one stack; `seed` brings the draws back, though not their interleaving.

    `kinds` are methods of Attacker, of WEIGHTS.
    """

    def __init__(self, stack: Stack, seed: int, kinds: Sequence[str] = tuple(WEIGHTS)) -> None:
        self._stack = stack
        self._seed = seed
        self._kinds = tuple(kinds)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._good: tuple[tuple[int, ...], ...] = ()
        self._num_read: dict[str, int] = {}
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.footprints: list[dict[str, Footprint]] = []
        self.complaints: list[str] = []

    async def run(self, seconds: float, round_seconds: float) -> None:
        """Rounds until the time is up. Raises AssertionError when the stack is not the same."""
        async with contextlib.AsyncExitStack() as exit_stack:
            for name, address in self._stack.addresses.items():
                channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
                self._channels[name] = await exit_stack.enter_async_context(channel)
            self._good = await self._ask_all(self._channels["router"])
            assert {len(answer) for answer in self._good} == {GOOD_TOKENS}
            end = time.monotonic() + seconds
            number = 0
            while time.monotonic() < end:
                await self._round(number, min(time.monotonic() + round_seconds, end))
                number += 1

    def growth(self, name: str) -> dict[str, float]:
        """What a process holds at the end over what it held at first."""
        return growth([each[name] for each in self.footprints])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "attacks": sum(self.outcomes.values()),
            "outcomes": {f"{kind}: {how}": n for (kind, how), n in sorted(self.outcomes.items())},
            "complaints": self.complaints,
            "growth": {name: self.growth(name) for name in self._stack.processes},
            "footprints": [
                {name: asdict(footprint) for name, footprint in each.items()}
                for each in self.footprints
            ],
        }

    async def _round(self, number: int, end: float) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in range(_NUM_ATTACKERS):
                group.create_task(self._attack_until(end, f"{self._seed}/{number}/{worker}"))
            group.create_task(self._ask_until(end))
        await self._until_empty()
        answers = await self._ask_all(self._channels["router"])
        assert answers == self._good, f"round {number}: {answers} are not {self._good}"
        async with (
            trickling(self._stack.addresses["router"]) as address,
            grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as slow,
        ):
            assert await self._ask(slow, _REQUESTS[0]) == self._good[0]
        await self._until_empty()
        for name, process in self._stack.processes.items():
            assert process.poll() is None, f"{name} died\n{self._stack.log(name)[-5000:]}"
            self._check_log(name)
        self.footprints.append(
            {name: Footprint.of(each.pid) for name, each in self._stack.processes.items()}
        )

    async def _attack_until(self, end: float, seed: str) -> None:
        weights = [WEIGHTS[kind] for kind in self._kinds]
        number = 0
        while time.monotonic() < end:
            name = f"{seed}/{number}"
            draw = random.Random(name)
            attacker = Attacker(self._stack.addresses, self._channels, draw)
            kind = draw.choices(self._kinds, weights)[0]
            try:
                async with asyncio.timeout(_HUNG_SECONDS):
                    how = await getattr(attacker, kind)()
            except TimeoutError:
                how = "hung"
                attacker.complaints.append("it hung")
            self.outcomes[kind, how] += 1
            for complaint in attacker.complaints:
                self._complain(f"{kind} {name}: {complaint}")
            number += 1

    def _complain(self, about: str) -> None:
        if len(self.complaints) < _MAX_COMPLAINTS:
            self.complaints.append(about)

    async def _ask_until(self, end: float) -> None:
        """The good requests, again and again, beside the attacks."""
        for request, good in itertools.cycle(zip(_REQUESTS, self._good, strict=True)):
            if time.monotonic() > end:
                return
            try:
                answer = await self._ask(self._channels["router"], request)
            except grpc.aio.AioRpcError as failure:
                self.outcomes["good", failure.code().name] += 1
                if failure.code() not in _BUSY:
                    self._complain(f"the good request: {failure.code()} {failure.details()}")
                continue
            self.outcomes["good", "OK"] += 1
            if answer != good:
                self._complain(f"the good request: {answer} instead of {good}")

    async def _ask_all(self, channel: grpc.aio.Channel) -> tuple[tuple[int, ...], ...]:
        return tuple([await self._ask(channel, request) for request in _REQUESTS])

    async def _ask(
        self, channel: grpc.aio.Channel, request: router_service_pb2.GenerateRequest
    ) -> tuple[int, ...]:
        """The tokens of a good request's answer."""
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        call = stub.Generate(request, timeout=_HUNG_SECONDS)
        return tuple([token.token_id async for event in call for token in event.tokens])

    async def _until_empty(self) -> None:
        """Returns when nothing is held; raises AssertionError when something stays."""
        give_up = time.monotonic() + _EMPTY_SECONDS
        decode = decode_service_pb2_grpc.DecodeServiceStub(self._channels["decode"])
        prefill = prefill_service_pb2_grpc.PrefillServiceStub(self._channels["prefill"])
        router = router_service_pb2_grpc.RouterServiceStub(self._channels["router"])
        while True:
            held = await decode.GetStatus(decode_service_pb2.GetDecodeStatusRequest(), timeout=10)
            prompts = await prefill.GetStatus(
                prefill_service_pb2.GetPrefillStatusRequest(), timeout=10
            )
            asked = await router.GetStatus(router_service_pb2.GetRouterStatusRequest(), timeout=10)
            left = {
                "blocks": held.kv_layout.num_blocks - held.kv_free_blocks,
                "leases": held.kv_leases,
                "quarantined blocks": held.kv_quarantined_blocks,
                "answers": held.running_requests + held.waiting_requests,
                "extending": held.pending_extend_tokens,
                "prompts": prompts.running_requests + prompts.waiting_requests,
                "prompt tokens": prompts.pending_tokens,
                "requests": asked.running_requests + asked.waiting_requests,
            }
            if not any(left.values()):
                return
            assert time.monotonic() < give_up, f"left over: {left}"
            await asyncio.sleep(0.02)

    def _check_log(self, name: str) -> None:
        text = self._stack.log(name)
        new = text[self._num_read.get(name, 0) :]
        self._num_read[name] = len(text)
        # gRPC logs that it could not send the status of a call whose caller has left.
        new = re.sub(r".*ExecuteBatchError raised in core.*\nTraceback", "", new)
        if "Traceback" in new:
            self._complain(f"{name} logged: {new[max(0, new.index('Traceback') - 300) :][:3000]}")


_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 4 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
