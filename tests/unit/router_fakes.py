"""Engines without processes or gRPC, for tests of the router's core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from headwater.errors import UnavailableError
from headwater.generation import FinishReason, SamplingParams, Token, TokenEvent
from headwater.services.router.core import RouterCore
from headwater.services.router.engines import KvUse, Lease
from headwater.services.router.objectives import Objectives
from headwater.services.router.outlook import Outlook
from headwater.services.router.policy import DecodeLoad, PrefillLoad, PromptPath
from headwater.services.router.served_model import ServedModel

MODEL_DIR = Path(__file__).parents[1] / "data" / "text_model"
EOS_TOKEN_ID = 2


class FakePrefill:
    """Reports progress, then waits at `gate`."""

    name = "prefill"
    address = "fake:1"

    def __init__(self) -> None:
        self.is_serving = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.started = asyncio.Event()
        self.is_cancelled = False
        self.deadline: float | None = None
        self.prompts: list[tuple[int, ...]] = []

    async def load(self) -> PrefillLoad:
        return PrefillLoad()

    async def prefill(
        self,
        request_id: str,
        token_ids: Sequence[int],
        lease: Lease,
        priority: int,
        deadline: float | None,
    ) -> AsyncGenerator[float, None]:
        self.prompts.append(tuple(token_ids))
        self.deadline = deadline
        try:
            if self.error is not None:
                raise self.error
            yield 0.5
            self.started.set()
            await self.gate.wait()
            yield 1.0
        except (asyncio.CancelledError, GeneratorExit):
            self.is_cancelled = True
            raise


class FakeDecode:
    """Grants leases and plays `script`, waiting at `gate` before the third event."""

    name = "decode"
    address = "fake:2"

    def __init__(self, script: Sequence[TokenEvent] = ()) -> None:
        self.is_serving = True
        self.script = list(script)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reserve_gate = asyncio.Event()
        self.reserve_gate.set()
        self.reserve_errors: list[Exception] = []
        self.error: Exception | None = None
        self.started = asyncio.Event()
        self.renewed = asyncio.Event()
        self.released: list[int] = []
        self.reserved: list[tuple[int, int]] = []
        self.ttl_seconds = 3600.0
        self.is_cancelled = False
        self.sampling: SamplingParams | None = None
        self.samplings: list[SamplingParams] = []
        self.num_forks = 0
        self.fork_errors: list[Exception] = []
        # Positions in the script at which the engine goes away, once each.
        self.deaths: set[int] = set()
        self.prompt: Sequence[int] = ()
        self.cached_tokens = 3
        # What generate was called with, each time.
        self.leases: list[Lease] = []

    async def reserve(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_new_tokens: int,
        deadline: float | None,
    ) -> Lease:
        await self.reserve_gate.wait()
        if self.reserve_errors:
            raise self.reserve_errors.pop(0)
        self.reserved.append((len(token_ids), max_new_tokens))
        cached_tokens = min(self.cached_tokens, len(token_ids) - 1)
        return Lease(len(self.reserved), 7, cached_tokens, self.ttl_seconds, handle=None)

    async def fork(self, lease: Lease, prompt_tokens: int, deadline: float | None) -> Lease:
        if self.fork_errors:
            raise self.fork_errors.pop(0)
        self.num_forks += 1
        return Lease(1000 + self.num_forks, 7, 3, self.ttl_seconds, handle=None)

    async def renew(self, epoch: int, lease_ids: Sequence[int]) -> frozenset[int]:
        self.renewed.set()
        return frozenset()

    async def release(self, epoch: int, lease_ids: Sequence[int]) -> None:
        self.released.extend(lease_ids)

    async def load(self) -> DecodeLoad:
        return DecodeLoad()

    async def kv_use(self) -> KvUse:
        return KvUse(num_blocks=8, num_free_blocks=8, block_tokens=16)

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
        self.leases.append(lease)
        self.sampling = sampling
        self.samplings.append(sampling)
        self.prompt = prompt_token_ids
        try:
            for position, event in enumerate(self.script):
                if position < len(output_token_ids):
                    continue
                if position == 2:
                    self.started.set()
                    await self.gate.wait()
                    if self.error is not None:
                        raise self.error
                if position in self.deaths:
                    self.deaths.remove(position)
                    raise UnavailableError(f"decode died at {position}")
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.is_cancelled = True
            raise


def script_of(model: ServedModel, text: str) -> list[TokenEvent]:
    """The events of an answer that says `text` and ends with the end-of-sequence token."""
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    events = [TokenEvent((Token(i),)) for i in ids]
    end = TokenEvent((Token(EOS_TOKEN_ID),), FinishReason.STOP, stop_token_id=EOS_TOKEN_ID)
    return [*events, end]


class Rig:
    """A core with its fakes."""

    def __init__(
        self,
        answer: str,
        *,
        max_running: int = 4,
        max_waiting: int = 4,
        recovery_seconds: float = 0.0,
        shed_factor: float = 1.0,
        forced: PromptPath | None = None,
    ) -> None:
        self.model = ServedModel.load(MODEL_DIR, "tiny")
        self.prefill = FakePrefill()
        self.decode = FakeDecode(script_of(self.model, answer))
        self.outlook = Outlook(forced)
        self.core = RouterCore(
            model=self.model,
            prefill=self.prefill,
            decode=self.decode,
            objectives=Objectives("interactive=30/0.05, batch=600/1", "interactive"),
            outlook=self.outlook,
            max_running=max_running,
            max_waiting=max_waiting,
            recovery_seconds=recovery_seconds,
            shed_factor=shed_factor,
        )
