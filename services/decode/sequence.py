"""One request inside the decode engine: its tokens, its blocks, its sampler state, its listener."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.generation import FinishReason, Token, TokenEvent
from headwater.kv.hashing import block_hashes, chain
from headwater.telemetry.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.errors import HeadwaterError
    from headwater.kv.lease import KvLease
    from headwater.kv.pool import KvPool
    from headwater.services.decode.sampler import SamplerState


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its answer so far.

    `tokens` holds both, the prompt's first `num_prompt`; the KV of the first `num_computed` of them
    lies in `block_ids`. `has_hidden` says that prefill left the last token's hidden state in the
    lease's slot. `tpot_seconds` is the wish for time per token; `last_token_at`, a time.monotonic()
    value, tells whose token is due. The engine's thread notes `stages` and calls `emit` with each
    event, the last one carrying a finish reason, or with the error that ended the request.
    """

    request_id: str
    lease: KvLease
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampler: SamplerState
    emit: Callable[[TokenEvent | HeadwaterError], None]
    priority: int = 0
    tpot_seconds: float | None = None
    last_token_at: float = field(default_factory=time.monotonic)
    num_computed: int = 0
    has_hidden: bool = False
    is_cancelled: bool = False
    block_ids: list[int] = field(default_factory=list)
    stages: Stages = field(default_factory=Stages)
    _names: list[bytes] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed; those of the last one give the next token."""
        return len(self.tokens) - self.num_computed

    @property
    def is_in_prompt(self) -> bool:
        """Whether the next token to compute is one of the prompt's."""
        return not self.has_hidden and self.num_computed < self.num_prompt

    @property
    def num_extending(self) -> int:
        """Tokens to compute before the step that gives the next one can be an ordinary one.

        Zero for a sequence that only needs its last token computed, or nothing at all. Prompt and
        answer are computed in passes of their own, so those of the prompt come first.
        """
        if self.is_in_prompt:
            return self.num_prompt - self.num_computed
        return 0 if self.has_hidden or self.num_pending <= 1 else self.num_pending

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by who goes first: high priority, then early arrival."""
        return (-self.priority, self.lease.lease_id)

    def names(self) -> tuple[bytes, ...]:
        """Names of all full blocks of its tokens."""
        return block_hashes(self.tokens, self.lease.layout.block_tokens)

    def computed(self, count: int, pool: KvPool) -> None:
        """Notes that `count` more tokens have KV, and lets others use the blocks that are full."""
        if count and self.is_in_prompt:
            self.stages.note("prefill.chunk", chunk_tokens=count)
        self.num_computed += count
        size = self.lease.layout.block_tokens
        while (index := len(self._names)) < self.num_computed // size:
            parent = self._names[-1] if self._names else b""
            token_ids = self.tokens[index * size : (index + 1) * size]
            self._names.append(chain(parent, token_ids))
            pool.name_block(self.block_ids[index], self._names[-1], parent, token_ids)

    def restart(self, block_ids: list[int], num_cached: int) -> None:
        """Goes on from other blocks, of which the first `num_cached` tokens are computed."""
        self.block_ids = block_ids
        self.num_computed = num_cached
        self.has_hidden = False
        self._names = list(self.names()[: num_cached // self.lease.layout.block_tokens])

    def take(self, token: Token) -> TokenEvent:
        """Notes a sampled token and says whether it is the last."""
        if self.sampler.num_output_tokens == 1:
            self.stages.note("first_token")
        self.tokens.append(token.id)
        self.has_hidden = False
        self.last_token_at = time.monotonic()
        params = self.sampler.params
        stops = params.stop_token_ids + (() if params.ignore_eos else self.sampler.eos_token_ids)
        if token.id in stops:
            return TokenEvent((token,), FinishReason.STOP, stop_token_id=token.id)
        grammar = self.sampler.grammar
        if grammar is not None and grammar.is_complete:
            return TokenEvent((token,), FinishReason.STOP)
        if self.sampler.num_output_tokens >= self.max_tokens:
            return TokenEvent((token,), FinishReason.LENGTH)
        return TokenEvent((token,))
