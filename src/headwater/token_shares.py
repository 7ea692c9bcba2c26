"""How the tokens of one pass over the weights are shared among prompts; used by both engines.

A pure function: who waits, how long they have waited and what they are is the caller's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def share_tokens(pending: Sequence[int], budget: int) -> list[int]:
    """How many of its `pending` tokens each prompt computes in a pass of at most `budget`.

    `pending` is in the order of who goes first; `budget` may be zero. Half of the pass is the first
    one's, so that it is never held up for ever; the other half goes to the shortest of the others,
    so that none of them stands behind a long one; what these leave is the first one's again.
    """
    if not pending:
        return []
    shares = [0] * len(pending)
    shares[0] = min(pending[0], budget - budget // 2)
    left = budget - shares[0]
    for index in sorted(range(1, len(pending)), key=lambda i: pending[i]):
        shares[index] = min(pending[index], left)
        left -= shares[index]
    shares[0] += min(left, pending[0] - shares[0])
    return shares
