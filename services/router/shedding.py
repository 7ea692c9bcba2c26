"""Refuses requests early whose first token would come too late anyway.

A refusal costs nothing and says when to try again; a request that fails after it has waited has
cost others their time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import OverloadedError
from headwater.services.router.policy import limit_seconds

if TYPE_CHECKING:
    from headwater.objectives import Objective
    from headwater.services.router.admission import Admission
    from headwater.services.router.outlook import Outlook

logger = logging.getLogger(__name__)

_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was expected of a request when it got its place, in seconds from then."""

    outlook: Outlook
    raw_wait_seconds: float
    alone_seconds: float

    def met(self, seconds: float) -> None:
        """Notes that the first token came after `seconds`."""
        self.outlook.waited(self.raw_wait_seconds, seconds - self.alone_seconds)


class Shedding:
    """The two checks: on arrival, and with a place, when it is known how much is cached."""

    def __init__(self, outlook: Outlook, admission: Admission, shed_factor: float) -> None:
        self._outlook = outlook
        self._admission = admission
        self._factor = shed_factor

    def check_arrival(self, objective: Objective, num_prompt_tokens: int) -> None:
        """Raises OverloadedError when waiting for others alone would take too long."""
        wait = self._outlook.wait_seconds(self._admission.queue, num_prompt_tokens)
        self._check(objective, wait, num_prompt_tokens)

    def check_place(
        self, objective: Objective, waited_seconds: float, num_new_tokens: int
    ) -> Expectation:
        """The same for a request that holds a place, with `num_new_tokens` to compute."""
        queue = self._admission.queue_behind_none
        alone = self._outlook.alone_seconds(num_new_tokens)
        wait = self._outlook.wait_seconds(queue, num_new_tokens)
        self._check(objective, waited_seconds + wait + alone, num_new_tokens)
        raw_wait = self._outlook.raw_wait_seconds(queue, num_new_tokens)
        return Expectation(self._outlook, raw_wait, alone)

    def _check(self, objective: Objective, expected_seconds: float, num_tokens: int) -> None:
        alone = self._outlook.alone_seconds(num_tokens)
        limit = limit_seconds(objective.ttft_seconds, alone, self._factor)
        if expected_seconds <= limit:
            return
        logger.debug(
            "refused, expected %.3g s: %s, %s, %s, overdue %.3g s",
            expected_seconds,
            self._admission.queue,
            self._outlook.prefill,
            self._outlook.decode,
            self._outlook.overdue_seconds(),
        )
        late_ms = int(1000 * (expected_seconds - limit))
        retry_after_ms = min(max(late_ms, _MIN_RETRY_MS), _MAX_RETRY_MS)
        raise OverloadedError(
            f"the first token is expected in {expected_seconds:.3g} s, later than the "
            f"{limit:.3g} s that requests of class {objective.name} may wait; try again in "
            f"{retry_after_ms} ms, or ask with another class",
            retry_after_ms,
        )
