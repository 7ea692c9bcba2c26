"""What the router needs of the engines, in domain terms: no protobuf, no gRPC.

The core is written against these; headwater.services.router.grpc_engines implements them.
Every method raises HeadwaterError subclasses only. A `deadline` is a time.monotonic() value, None
for no limit.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headwater.generation import SamplingParams, TokenEvent
from headwater.services.router.policy import DecodeLoad, PrefillLoad


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to KV blocks for one request."""

    id: int
    epoch: int
    cached_tokens: int
    ttl_seconds: float
    # The wire form, for the engine that writes under the lease; opaque to the router.
    handle: object
    # Tokens of the prompt that prefill has computed. Zero: decode computes what is not cached.
    prefilled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvUse:
    """How full the KV pool is, in blocks of `block_tokens` tokens."""

    num_blocks: int
    num_free_blocks: int
    block_tokens: int


class Engine(Protocol):
    """A process the router depends on."""

    @property
    def name(self) -> str:
        """ "prefill" or "decode"."""

    @property
    def address(self) -> str:
        """Host and port."""

    @property
    def is_serving(self) -> bool:
        """Whether its last health check said SERVING."""


class PrefillEngine(Engine, Protocol):
    """Computes prompts into leased blocks."""

    async def load(self) -> PrefillLoad:
        """What computing takes, as the engine has measured it; not what it has to do now."""

    def prefill(
        self,
        request_id: str,
        token_ids: Sequence[int],
        lease: Lease,
        priority: int,
        deadline: float | None,
    ) -> AsyncGenerator[float, None]:
        """Yields the share done, in [0, 1], and ends when all is done; closing it cancels."""


class DecodeEngine(Engine, Protocol):
    """Owns the KV pool and generates tokens."""

    async def reserve(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_new_tokens: int,
        deadline: float | None,
    ) -> Lease:
        """Leases blocks for a prompt. Raises KvExhaustedError when there is no room now."""

    async def fork(self, lease: Lease, prompt_tokens: int, deadline: float | None) -> Lease:
        """Another lease on a prefilled prompt. Raises KvExhaustedError when there is no room."""

    async def renew(self, epoch: int, lease_ids: Sequence[int]) -> frozenset[int]:
        """Extends leases by their time to live; returns those that are not alive any more."""

    async def release(self, epoch: int, lease_ids: Sequence[int]) -> None:
        """Gives leases back; may be repeated."""

    async def load(self) -> DecodeLoad:
        """What computing takes, as the engine has measured it, and how many may generate; not what
        it has to do now.
        """

    async def kv_use(self) -> KvUse:
        """How full the pool is at the moment."""

    def generate(
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
        """Yields the tokens that follow prompt and output; the last event has a finish reason.

        `tpot_seconds` is the wish for time per token. Closing it cancels.
        """
