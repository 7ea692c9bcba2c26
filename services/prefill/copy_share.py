"""What share of the time copies of weights may take while decode computes answers.

Owns the setting, or the measuring in its place: decode's steps while weights are copied are held
against its steps while none are, and the share follows, so that a long prompt slows nobody's answer
by more than is promised. Pure bookkeeping on what decode and the copies say of themselves.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# DESIGN promises 15 %; measurements fluctuate.
_WANTED_EXCESS = 0.12
_LEAST_SHARE = 0.2
# The share changes by no more than this factor at once.
_LARGEST_STEP = 1.4
# What is compared are means of so many steps.
_STEPS = 8
# After a pass copies run ahead into the next one; that long after it, and there are none.
_PAUSE_SECONDS = 1.0
# Answers grow, and with them their steps: after this long a comparison says nothing.
_VALID_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Requests that decode computes, its steps and their seconds so far.

    `is_in_pass` says that weights are copied for prompts, `is_mixed` that steps compute prompt
    tokens, too, and cannot be compared.
    """

    running: int
    steps: int
    busy_seconds: float
    is_in_pass: bool
    is_mixed: bool = False


class CopyShare:
    """`share` is in (0, 1]; a `setting` of zero: as measured."""

    def __init__(self, setting: float) -> None:
        self._is_measured = setting == 0.0
        self.share = setting or 1.0
        self._began: Reading | None = None
        self._latest: Reading | None = None
        self._was_copying = False
        self._copied_at = float("-inf")
        # By requests: seconds of an undisturbed step, and when it was measured.
        self._alone: dict[int, tuple[float, float]] = {}

    def observe(self, reading: Reading) -> None:
        """Takes a reading; a few a second."""
        if not self._is_measured:
            return
        latest, self._latest = self._latest, reading
        if latest is None:
            self._began = reading
            return
        if reading.is_in_pass:
            self._copied_at = time.monotonic()
        is_copying = time.monotonic() - self._copied_at < _PAUSE_SECONDS
        is_alike = is_copying == self._was_copying and reading.running == latest.running
        # Another decode process begins to count anew.
        is_alike = is_alike and reading.steps >= latest.steps
        self._was_copying = is_copying
        if not is_alike or reading.is_mixed or not reading.running or self._began is None:
            self._began = reading
            return
        steps = reading.steps - self._began.steps
        if steps < _STEPS:
            return
        mean = (reading.busy_seconds - self._began.busy_seconds) / steps
        self._began = reading
        if not is_copying:
            self._alone[reading.running] = mean, time.monotonic()
            return
        alone, measured_at = self._alone.get(reading.running, (0.0, 0.0))
        if alone > 0.0 and time.monotonic() - measured_at < _VALID_SECONDS:
            self._follow(mean / alone - 1.0)

    def _follow(self, excess: float) -> None:
        """Steps take this share of their time longer than undisturbed ones."""
        factor = _WANTED_EXCESS / max(excess, 1e-6)
        factor = min(_LARGEST_STEP, max(1.0 / _LARGEST_STEP, factor))
        share = min(1.0, max(_LEAST_SHARE, self.share * factor))
        if share != self.share:
            logger.debug("steps take %.0f %% longer: copies get %.2f", 100 * excess, share)
        self.share = share
