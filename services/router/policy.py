"""Where a prompt is computed, and when its first token may be expected: pure functions of costs.

The prefill service computes prompts beside the decoding ones; decode can compute them itself,
between its steps, which saves the hand-over and costs the running streams time. Which is faster
follows from what both have measured. Owns no state; see outlook.py for where the numbers come from.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.costs import PassCosts, affordable_tokens, smallest_piece

if TYPE_CHECKING:
    from collections.abc import Mapping

# As in headwater.services.decode.pace: what decode gives to prompts however strict the streams are,
# and how long its steps may always be.
_MIN_EXTEND_SHARE = 0.1
_LEAST_IN_STEPS = 2.0
# As long as decode has not told its own.
UNKNOWN_BATCH_LIMIT = 2**31
# A request that would be late even on an idle machine is not late because of load: it may take
# twice what it takes alone.
_LEAST_IN_ALONE = 2.0


class PromptPath(enum.Enum):
    """Who computes a prompt."""

    PREFILL = "prefill"
    EXTEND = "extend"


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The prefill service: its costs, and the prompt tokens that it has still to compute."""

    costs: PassCosts = field(default_factory=PassCosts)
    pending_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Decode: what a step takes, what prompt tokens beside it take, and who is there.

    `num_streams` generate, of which the strictest wishes for `tpot_seconds` per token;
    `batch_limit` may. `pending_tokens` are those of prompts that decode has still to compute.
    """

    step_seconds: float = 0.0
    extend_costs: PassCosts = field(default_factory=PassCosts)
    pending_tokens: int = 0
    num_streams: int = 0
    tpot_seconds: float = math.inf
    batch_limit: int = UNKNOWN_BATCH_LIMIT


@dataclass(frozen=True, slots=True)
class Queue:
    """The line before the engines: how many hold places, wait, and may hold places.

    `is_full` says that the first in line waits for somebody to leave: places or KV blocks are all
    taken. `held_seconds` is how long one holds its place, `stream_seconds` how long one generates;
    both zero as long as nobody has.
    """

    num_running: int
    num_waiting: int
    max_running: int
    is_full: bool
    held_seconds: float = 0.0
    stream_seconds: float = 0.0


def prefill_seconds(load: PrefillLoad, num_tokens: int) -> float:
    """Time until the prefill service has computed `num_tokens` more; zero when nothing is known."""
    ahead = _ahead(load.pending_tokens, num_tokens, load.costs.max_tokens_per_pass)
    # Those before are under way, half through on average, in a pass that nobody can join; through
    # a GPU that weights stream to, a pass takes as long as thousands of tokens.
    under_way = load.costs.seconds_per_pass / 2 if ahead else 0.0
    return under_way + load.costs.seconds(ahead + num_tokens)


def extend_seconds(load: DecodeLoad, num_tokens: int) -> float:
    """Time until decode has computed `num_tokens` more beside its streams.

    Decode computes as much beside a step as the strictest stream's wish leaves time for. Zero when
    nothing is known.
    """
    costs = load.extend_costs
    ahead = _ahead(load.pending_tokens, num_tokens, costs.max_tokens_per_pass)
    tokens = ahead + num_tokens
    if not load.num_streams:
        return costs.seconds(tokens)
    if math.isinf(load.tpot_seconds):
        return costs.seconds(tokens) + load.step_seconds * -(-tokens // costs.max_tokens_per_pass)
    limit = max(load.tpot_seconds, _LEAST_IN_STEPS * load.step_seconds)
    spare = max(limit - load.step_seconds, _MIN_EXTEND_SHARE * limit)
    piece = max(smallest_piece(costs), affordable_tokens(costs, spare))
    seconds = -(-tokens // piece) * costs.seconds_per_pass + tokens * costs.seconds_per_token
    # Of each `step_seconds + spare`, only `spare` goes to prompts.
    return seconds * (load.step_seconds + spare) / spare


def choose_path(
    expected_seconds: Mapping[PromptPath, float],
    num_tokens: int,
    prefill: PrefillLoad,
    decode: DecodeLoad,
) -> PromptPath:
    """The path with the earlier first token; prefill, which stalls nobody, when both are alike.

    Where nothing is known of decode, it is tried with prompts that take it one pass.
    """
    if not prefill.costs.measured_passes:
        return PromptPath.PREFILL
    if not decode.extend_costs.measured_passes:
        is_short = num_tokens <= decode.extend_costs.max_tokens_per_pass
        return PromptPath.EXTEND if is_short else PromptPath.PREFILL
    is_faster = expected_seconds[PromptPath.EXTEND] < expected_seconds[PromptPath.PREFILL]
    return PromptPath.EXTEND if is_faster else PromptPath.PREFILL


def queue_seconds(queue: Queue, decode: DecodeLoad) -> float:
    """Time that a new request waits for others to end, beside the computation of its prompt.

    A place comes free each `held_seconds / num_running`; a place in the batch, where there are
    fewer of these, each `stream_seconds / batch_limit`.
    """
    wait = 0.0
    if queue.is_full:
        wait = (queue.num_waiting + 1) * queue.held_seconds / max(1, queue.num_running)
    ahead = queue.num_running + queue.num_waiting + 1 - decode.batch_limit
    return max(wait, max(0, ahead) * queue.stream_seconds / max(1, decode.batch_limit))


def limit_seconds(objective_seconds: float, alone_seconds: float, shed_factor: float) -> float:
    """Latest first token that is worth waiting for; infinite with a factor of zero."""
    if shed_factor == 0.0:
        return math.inf
    return shed_factor * max(objective_seconds, _LEAST_IN_ALONE * alone_seconds)


def _ahead(pending_tokens: int, num_tokens: int, pass_tokens: int) -> int:
    """Tokens computed before, or together with, the last one of a new prompt.

    A prompt that fits half a pass waits for the pass under way and shares the next one; see
    headwater.token_shares. A longer one waits for all before it.
    """
    if num_tokens <= pass_tokens // 2:
        return min(pending_tokens, pass_tokens + pass_tokens // 2)
    return pending_tokens
