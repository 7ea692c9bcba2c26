"""Who runs in the next step, and on how many tokens.

Continuous batching: every running sequence takes a token per step, as far as the wishes for time
per token allow (see pace.py). Those that must first compute more (a short prompt, or all again
after a preemption) share a bounded number of tokens per step, so that nobody's next token waits for
somebody's prompt. When blocks run out, whoever would go last gives its blocks back and waits. Used
from the engine's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.token_shares import share_tokens

if TYPE_CHECKING:
    from headwater.costs import CostMeter
    from headwater.kv.pool import KvPool
    from headwater.services.decode.pace import Pace
    from headwater.services.decode.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence and how many of its pending tokens this step computes.

    They are all of its prompt, or none of them is.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens are the prompt's."""
        return self.sequence.is_in_prompt

    @property
    def gives_token(self) -> bool:
        """Whether the step ends with a new token of the sequence."""
        return self.num_tokens == self.sequence.num_pending or self.sequence.has_hidden


class Scheduler:
    """Keeps the sequences that run and those that wait, each in the order of who goes first."""

    def __init__(
        self, pool: KvPool, pace: Pace, extend_meter: CostMeter, *, max_batch: int
    ) -> None:
        self.pace = pace
        self._pool = pool
        self._extend_meter = extend_meter
        self._max_batch = max_batch
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence."""
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.order)

    def finish(self, sequence: Sequence) -> None:
        """Takes out a sequence that ended."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def cancelled(self) -> list[Sequence]:
        """Sequences whose caller has gone."""
        return [s for s in (*self.running, *self.waiting) if s.is_cancelled]

    @property
    def num_extending_tokens(self) -> int:
        """Tokens that must be computed before those they belong to can go on."""
        return sum(s.num_extending for s in (*self.running, *self.waiting))

    def plan(self) -> list[Work]:
        """The work of the next step; empty when nothing can run now."""
        self._admit()
        counts = self._counts()
        work = []
        for sequence in list(self.running):
            if sequence not in self.running or id(sequence) not in counts:
                continue  # gave its blocks to one before it, or has no part in this step
            count = counts[id(sequence)]
            if self._make_room(sequence, sequence.num_computed + count):
                work.append(Work(sequence, count))
        return work

    def _counts(self) -> dict[int, int]:
        """How many tokens each sequence computes, for those that take part in the step."""
        extending = [s for s in self.running if s.num_extending]
        decoding = [s for s in self.running if not s.num_extending]
        counts = {id(s): 0 if s.has_hidden else 1 for s in self.pace.members(decoding)}
        if extending:
            budget = self.pace.extend_budget(decoding, self._extend_meter.costs)
            shares = share_tokens([s.num_extending for s in extending], budget)
            counts |= {id(s): share for s, share in zip(extending, shares, strict=True) if share}
        return counts

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch:
            sequence = self.waiting[0]
            if not self.pace.admits(self.running, sequence):
                break
            if not sequence.block_ids and not self._refill(sequence):
                break
            sequence.stages.note("joined_batch", batch_size=len(self.running) + 1)
            self.running.append(self.waiting.pop(0))
        self.running.sort(key=lambda s: s.order)

    def _refill(self, sequence: Sequence) -> bool:
        refilled = self._pool.refill(
            sequence.lease, len(sequence.tokens), sequence.names(), headroom=len(self.running)
        )
        if refilled is None:
            return False
        sequence.restart(*refilled)
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows the blocks to hold `num_tokens`; False when the sequence had to give up its own."""
        while len(sequence.block_ids) * sequence.lease.layout.block_tokens < num_tokens:
            block = self._pool.grow(sequence.lease)
            if block is not None:
                sequence.block_ids.append(block)
                continue
            victim = self._last_holder()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_holder(self) -> Sequence:
        """Of all that hold blocks, the one that would go last; those that wait come first."""
        for sequence in reversed(self.waiting):
            if sequence.block_ids:
                return sequence
        return self.running[-1]

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        sequence.stages.note("preempted")
        self._pool.give_up_blocks(sequence.lease)
        sequence.restart([], 0)
        if sequence in self.running:
            self.running.remove(sequence)
            self.add(sequence)
