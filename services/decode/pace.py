"""Keeps to the requests' wishes for time per token: who may join, who takes part in a step, and
how many prompt tokens are computed beside it.

Knows sequences and predicted times; holds no sequence itself. Used from the engine's thread only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headwater.costs import affordable_tokens, smallest_piece

if TYPE_CHECKING:
    from collections.abc import Sequence as Listing

    from headwater.costs import PassCosts
    from headwater.services.decode.sequence import Sequence
    from headwater.services.decode.step_model import StepModel

# A wish that hardly a single request meets must not make everybody wait for everybody: steps may
# always take as long as this many steps of a single request, and longer when one alone misses it.
_LEAST_IN_SINGLE_STEPS = 2.0
_LEAST_OUT_OF_REACH = 4.0
# However little time a wish leaves, this share of it goes to prompts, so that they get on.
_MIN_EXTEND_SHARE = 0.1


class Pace:
    """The rules. A sequence without a wish takes part in every step that has room for it."""

    def __init__(self, steps: StepModel, *, extend_tokens: int) -> None:
        self._steps = steps
        self._extend_tokens = extend_tokens
        self._saved_seconds = 0.0

    def limit_seconds(self, sequences: Listing[Sequence]) -> float:
        """Longest step that the strictest wish allows; infinite without one."""
        wishes = [s.tpot_seconds for s in sequences if s.tpot_seconds is not None]
        if not wishes or not self._steps.is_known:
            return math.inf
        single = self._steps.seconds(1, _mean_context(sequences))
        strictest = min(wishes)
        steps = _LEAST_IN_SINGLE_STEPS if single <= strictest else _LEAST_OUT_OF_REACH
        return max(strictest, steps * single)

    def admits(self, running: Listing[Sequence], candidate: Sequence) -> bool:
        """Whether all keep their wishes when `candidate` joins; one alone always may.

        A sequence that wishes for a token every tenth step only counts for a tenth.
        """
        if not running:
            return True
        sequences = [*running, candidate]
        limit = self.limit_seconds(sequences)
        if math.isinf(limit):
            return True
        shares = [min(1.0, limit / (s.tpot_seconds or limit)) for s in sequences]
        context = sum(share * len(s.tokens) for share, s in zip(shares, sequences, strict=True))
        return self._steps.seconds(sum(shares), context) <= limit

    def members(self, decoding: Listing[Sequence]) -> list[Sequence]:
        """Who takes part in the next step: all, or as many as the strictest wish allows.

        Whose next token is due first goes first.
        """
        limit = self.limit_seconds(decoding)
        if math.isinf(limit) or self.step_seconds(decoding) <= limit:
            return list(decoding)
        by_due = sorted(decoding, key=lambda s: s.last_token_at + (s.tpot_seconds or limit))
        chosen = by_due[:1]
        for sequence in by_due[1:]:
            if self.step_seconds([*chosen, sequence]) > limit:
                break
            chosen.append(sequence)
        return chosen

    def step_seconds(self, sequences: Listing[Sequence]) -> float:
        """What a step of these would take; zero when nothing is known."""
        return self._steps.seconds(len(sequences), sum(len(s.tokens) for s in sequences))

    def batch_limit(self, running: Listing[Sequence], max_batch: int) -> int:
        """How many like those that run may run at once."""
        limit, context = self.limit_seconds(running), _mean_context(running)
        for count in range(1, max_batch):
            if self._steps.seconds(count + 1, (count + 1) * context) > limit:
                return count
        return max_batch

    def extend_budget(self, decoding: Listing[Sequence], costs: PassCosts) -> int:
        """Prompt tokens to compute beside the next step of `decoding`; to be asked once a step.

        As many as take what the wish leaves of the step's time. Where that is too little for a
        pass, several steps save up for the smallest one: the time per token keeps to the wish on
        average, and no stall is longer than it must be.
        """
        limit = self.limit_seconds(decoding)
        if not decoding or math.isinf(limit) or not costs.measured_passes:
            return self._extend_tokens
        spare = max(limit - self.step_seconds(decoding), _MIN_EXTEND_SHARE * limit)
        smallest = smallest_piece(costs)
        affordable = affordable_tokens(costs, spare)
        if affordable >= smallest:
            return affordable
        self._saved_seconds += spare
        if self._saved_seconds < costs.seconds(smallest):
            return 0
        self._saved_seconds = 0.0
        return smallest


def _mean_context(sequences: Listing[Sequence]) -> float:
    return sum(len(s.tokens) for s in sequences) / max(1, len(sequences))
