"""On how many GPUs the next pass is computed: the first alone, or all of them together.

Owns the choice and the measured costs of both ways. While decode uses a GPU of ours to compute
answers, that one is left to it, and the first goes on alone; otherwise the way that is expected to
take less time is taken.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from headwater.costs import CostMeter, PassCosts

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

# For how long after its last answer decode is thought to be at work; a conversation's next turn, or
# the next of many requests, should not find its GPU taken for a whole sweep.
_LINGER_SECONDS = 2.0
# A way that was slow when it was measured, beside other work, say, is tried again after so many
# passes of others: often enough to come back, and too seldom for one prompt in a hundred to notice.
_TRY_AGAIN_PASSES = 256


class PassWays:
    """The ways there are, by number of GPUs, and what passes take each way.

    `current` is the way of the pass under way, or of the next one. One thread chooses and observes;
    any may tell of decode, and read.
    """

    def __init__(self, pass_tokens: int) -> None:
        self._pass_tokens = pass_tokens
        self._meters = {1: CostMeter(pass_tokens)}
        self.passes = {1: 0}
        # Passes of other ways since each was taken.
        self._unused = {1: 0}
        self.current = 1
        self.leaves_one_to_decode = False
        self._decode_until = 0.0

    def offer(self, max_tokens: Mapping[int, int]) -> None:
        """These are the ways from now on, and the tokens that a pass of each may have."""
        self._meters = {way: CostMeter(tokens) for way, tokens in max_tokens.items()}
        self.passes = dict.fromkeys(max_tokens, 0)
        self._unused = dict.fromkeys(max_tokens, 0)
        self.current = max(max_tokens)

    def limit(self, max_tokens: Mapping[int, int]) -> None:
        """These ways are left, or are back, with so many tokens; costs stay as measured."""
        meters = {}
        for way, tokens in max_tokens.items():
            meters[way] = self._meters.get(way) or CostMeter(tokens)
            meters[way].max_tokens_per_pass = tokens
        self._meters = meters
        if self.current not in meters:
            self.current = max(meters)

    def note_decode(self, *, is_at_work: bool) -> None:
        """Decode computes answers, or does not, on a GPU that is one of ours."""
        if is_at_work:
            self._decode_until = time.monotonic() + _LINGER_SECONDS

    @property
    def num_shared(self) -> int:
        """Passes that several GPUs computed together."""
        return sum(count for way, count in self.passes.items() if way > 1)

    @property
    def is_decode_at_work(self) -> bool:
        """Whether it was, a moment ago."""
        return time.monotonic() < self._decode_until

    @property
    def pass_tokens(self) -> int:
        """Tokens that a pass may have, the current way."""
        return self._meter_of(self.current).max_tokens_per_pass

    @property
    def costs(self) -> PassCosts:
        """What passes take the way that would be chosen for a long prompt now."""
        longest = max(meter.max_tokens_per_pass for meter in self._meters.values())
        return self._meter_of(self._best(longest)).costs

    @property
    def all_costs(self) -> dict[int, PassCosts]:
        """What passes take each way."""
        return {way: meter.costs for way, meter in self._meters.items()}

    def choose(self, num_tokens: int) -> int:
        """The way for prompts of so many tokens in all, which is current from now on."""
        way, reason = self._best(num_tokens), "as measured"
        if self._is_one_left_to_decode:
            reason = "decode is at work"
        else:
            unused = self._unused
            again = [w for w in self._meters if unused.get(w, 0) >= _TRY_AGAIN_PASSES]
            if again:
                way, reason = max(again), "to measure it again"
                # Once, even if it fails.
                self._unused = unused | {way: 0}
        if way != self.current:
            logger.info("passes are computed on %d GPUs now: %s", way, reason)
            self.current = way
        return way

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A pass the current way took so long."""
        self._meter_of(self.current).observe(num_tokens, seconds)
        self._unused = {
            way: 0 if way == self.current else count + 1 for way, count in self._unused.items()
        }

    def observe_made_up(self, way: int, num_tokens: int, seconds: float) -> None:
        """The same of a pass that computed no prompt."""
        self._meter_of(way).observe(num_tokens, seconds)

    def count(self) -> None:
        """A pass the current way has computed prompts."""
        self.passes[self.current] = self.passes.get(self.current, 0) + 1

    def _meter_of(self, way: int) -> CostMeter:
        """Its meter; of a way that is no longer offered, since a moment ago, one of its own."""
        return self._meters.get(way) or CostMeter(self._pass_tokens)

    @property
    def _is_one_left_to_decode(self) -> bool:
        return self.leaves_one_to_decode and self.is_decode_at_work

    def _best(self, num_tokens: int) -> int:
        costs = self.all_costs
        ways = sorted(costs)
        if len(ways) == 1 or self._is_one_left_to_decode:
            return ways[0]
        # What has not been measured yet is tried, the widest first.
        unknown = [way for way in ways if costs[way].measured_passes == 0]
        if unknown:
            return unknown[-1]
        return min(ways, key=lambda way: costs[way].seconds(max(1, num_tokens)))
