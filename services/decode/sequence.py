"""One request inside the decode engine: its tokens, its lease, its sampler state, its listener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.generation import FinishReason, Token, TokenEvent
from headwater.services.decode.sampler import SamplerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.errors import HeadwaterError
    from headwater.generation import SamplingParams
    from headwater.kv.lease import KvLease
    from headwater.model.spec import ModelSpec


@dataclass(slots=True)
class Sequence:
    """A prefilled prompt that grows by a token per step.

    `emit` is called from the engine's thread with each event, the last one carrying a finish
    reason, or with the error that ended the request.
    """

    request_id: str
    lease: KvLease
    num_prompt_tokens: int
    max_tokens: int
    sampler: SamplerState
    emit: Callable[[TokenEvent | HeadwaterError], None]
    last_token: int | None = None
    is_cancelled: bool = False

    @classmethod
    def create(
        cls,
        request_id: str,
        lease: KvLease,
        prompt: tuple[int, ...],
        params: SamplingParams,
        spec: ModelSpec,
        emit: Callable[[TokenEvent | HeadwaterError], None],
    ) -> Sequence:
        """A sequence that may generate as many tokens as asked for, and as lease and model hold."""
        # The last token is never attended to, so it needs no KV.
        room = min(lease.capacity_tokens + 1, spec.max_context_tokens) - len(prompt)
        return cls(
            request_id=request_id,
            lease=lease,
            num_prompt_tokens=len(prompt),
            max_tokens=min(room, params.max_tokens or room),
            sampler=SamplerState.create(params, prompt, spec.eos_token_ids),
            emit=emit,
        )

    @property
    def position(self) -> int:
        """Position of the last token, whose KV is not computed yet."""
        return self.num_prompt_tokens + self.sampler.num_output_tokens - 1

    def take(self, token: Token) -> TokenEvent:
        """Notes a sampled token and says whether it is the last."""
        self.last_token = token.id
        params = self.sampler.params
        stops = params.stop_token_ids + (() if params.ignore_eos else self.sampler.eos_token_ids)
        if token.id in stops:
            return TokenEvent((token,), FinishReason.STOP, stop_token_id=token.id)
        if self.sampler.num_output_tokens >= self.max_tokens:
            return TokenEvent((token,), FinishReason.LENGTH)
        return TokenEvent((token,))
