"""What the pool knows of one lease, and what may be said about its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.errors import InvalidRequestError, LeaseError
from headwater.kv.hashing import block_hashes
from headwater.kv.words import number_of, prompt_word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.kv.lease import KvLease


@dataclass(slots=True)
class Holding:
    """One lease, and the blocks that it has now.

    `expires_at` is a value of the pool's clock; `found_names` are those of its cached blocks.
    """

    lease: KvLease
    request_id: str
    expires_at: float
    blocks: list[int] = field(default_factory=list)
    found_names: tuple[bytes, ...] = ()
    is_pinned: bool = False

    def check_complete(self, word: int) -> None:
        """Raises LeaseError when the slot's `word` is not of a prompt computed under this lease."""
        if number_of(word) != number_of(self.lease.generation):
            raise LeaseError(
                f"lease {self.lease.lease_id}: its prompt is not computed; call Prefill first"
            )

    def check_computed(self, word: int, token_ids: Sequence[int]) -> None:
        """Raises as `check_complete`, and InvalidRequestError when it is of other tokens."""
        self.check_complete(word)
        if word != prompt_word(self.lease.generation, token_ids):
            raise InvalidRequestError(
                "prompt_token_ids", "are not the tokens that Prefill was given"
            )

    def check_reserved_for(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError when the cached blocks are of other tokens."""
        cached = token_ids[: self.lease.cached_tokens]
        if block_hashes(cached, self.lease.layout.block_tokens) != self.found_names:
            raise InvalidRequestError(
                "prompt_token_ids", "are not the tokens that the lease was reserved for"
            )

    def check_holds(self, prompt_tokens: int) -> None:
        """Raises InvalidRequestError when the blocks cannot hold a prompt of that length."""
        most = len(self.blocks) * self.lease.layout.block_tokens
        if not self.lease.cached_tokens < prompt_tokens <= most:
            raise InvalidRequestError(
                "prompt_tokens",
                f"must be {self.lease.cached_tokens + 1} to {most}, as the lease holds, got "
                f"{prompt_tokens}",
            )
