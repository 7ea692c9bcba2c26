"""What the router expects of its engines: their costs, what it has given them, how right it was.

The engines tell what they measured; what they have still to do, the router knows best, since all
of it comes from here. Each prediction is compared with what happened, and the next ones are
corrected by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from headwater.costs import FadingMean, TwoPartFit
from headwater.services.router.policy import (
    DecodeLoad,
    PrefillLoad,
    PromptPath,
    choose_path,
    extend_seconds,
    prefill_seconds,
    queue_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.services.router.policy import Queue

# However wrong a prediction was, the next one is not further off than this from what the engines
# have measured: one request that met a fault must not decide for all.
_MAX_CORRECTION = 2.0
_MAX_OVERHEAD_SECONDS = 0.5
# Weight of the newest wait, in the logarithm, and the shortest one that counts.
_WAIT_WEIGHT = 0.2
_MIN_WAIT_SECONDS = 0.02
# As many predictions that came true are credited to the engines' own measurements.
_TRUST = 3
# Longest answer that is guessed as long as none has ended.
_GUESSED_TOKENS = 100
# Of so many of decode's batch limits the highest counts: they vary with each measured step, and to
# refuse a request for a moment's hiccup would be worse than to let it in.
_NUM_LIMITS = 10
# A prompt that takes longer than this many times what it should is not computed but waits.
_LATE_IN_ALONE = 2.0


class Correction:
    """What happened against what was predicted: an overhead, and a factor."""

    def __init__(self) -> None:
        self._fit = TwoPartFit()

    def apply(self, seconds: float) -> float:
        """The prediction as experience corrects it."""
        if not self._fit.num_points:
            return seconds
        overhead, factor = self._fit.parts
        factor = min(max(factor, 1.0 / _MAX_CORRECTION), _MAX_CORRECTION)
        return min(overhead, _MAX_OVERHEAD_SECONDS) + factor * seconds

    def observe(self, predicted_seconds: float, seconds: float) -> None:
        """Notes what became of a prediction of more than zero."""
        if predicted_seconds <= 0.0:
            return
        if not self._fit.num_points:
            for _ in range(_TRUST):
                self._fit.observe(1.0, predicted_seconds, predicted_seconds)
        self._fit.observe(1.0, predicted_seconds, seconds)

    def forget(self, predicted_seconds: float) -> None:
        """Drifts back to what the engine measured; else what is not chosen is never corrected."""
        if self._fit.num_points:
            self.observe(predicted_seconds, predicted_seconds)


class WaitCorrection:
    """The same for waiting in line, which has no overhead: a factor that follows slowly."""

    def __init__(self) -> None:
        self._factor = 1.0

    def apply(self, seconds: float) -> float:
        """The prediction as experience corrects it."""
        return self._factor * seconds

    def observe(self, predicted_seconds: float, seconds: float) -> None:
        """Notes what became of a prediction; short ones tell of the machine, not of the line."""
        if predicted_seconds < _MIN_WAIT_SECONDS:
            return
        ratio = max(seconds, _MIN_WAIT_SECONDS) / predicted_seconds
        factor = self._factor ** (1.0 - _WAIT_WEIGHT) * ratio**_WAIT_WEIGHT
        self._factor = min(max(factor, 1.0 / _MAX_CORRECTION), _MAX_CORRECTION)


class Pending:
    """A prompt that an engine computes."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._began_at = time.monotonic()
        self.num_left = num_tokens
        self.seconds: float | None = None

    def progressed(self, share: float) -> None:
        """So much of it is done, in [0, 1]."""
        self.num_left = round(self._num_tokens * (1.0 - share))

    def done(self) -> None:
        """All of it is done."""
        self.progressed(1.0)
        self.seconds = time.monotonic() - self._began_at


class Outlook:
    """Predicts times to the first token. Lives in the router's event loop.

    With `forced` all prompts take that path where they can.
    """

    def __init__(self, forced: PromptPath | None = None) -> None:
        self._forced = forced
        self._prefill = PrefillLoad()
        self._decode = DecodeLoad()
        self._pending: dict[PromptPath, set[Pending]] = {path: set() for path in PromptPath}
        self._batch_limits: deque[int] = deque(maxlen=_NUM_LIMITS)
        self._waits = WaitCorrection()
        self._corrections = {path: Correction() for path in PromptPath}
        self._streams: Counter[float] = Counter()
        self._stream_seconds = FadingMean()
        self._asked_tokens = FadingMean()
        self._first_tokens: dict[object, float] = {}
        self.num_chosen = dict.fromkeys(PromptPath, 0)

    @property
    def prefill(self) -> PrefillLoad:
        """The prefill service as it is now."""
        pending = self._pending_tokens(PromptPath.PREFILL)
        return dataclasses.replace(self._prefill, pending_tokens=pending)

    @property
    def decode(self) -> DecodeLoad:
        """Decode as it is now."""
        return dataclasses.replace(
            self._decode,
            pending_tokens=self._pending_tokens(PromptPath.EXTEND),
            num_streams=self._streams.total(),
            tpot_seconds=min((+self._streams).keys(), default=math.inf),
        )

    def told(self, engine: PrefillLoad | DecodeLoad) -> None:
        """Takes over what an engine says of its costs."""
        if isinstance(engine, PrefillLoad):
            self._prefill = engine
        else:
            self._batch_limits.append(engine.batch_limit)
            limit = max(self._batch_limits)
            self._decode = dataclasses.replace(engine, batch_limit=limit)

    def choose(self, num_tokens: int) -> PromptPath:
        """Who is to compute a prompt of which `num_tokens` are not in the cache."""
        if self._forced is not None:
            return self._forced
        prefill, decode = self.prefill, self.decode
        raw = _raw_seconds(prefill, decode, num_tokens)
        expected = {path: self._corrections[path].apply(raw[path]) for path in PromptPath}
        path = choose_path(expected, num_tokens, prefill, decode)
        for other in set(PromptPath) - {path}:
            self._corrections[other].forget(raw[other])
        return path

    @contextlib.contextmanager
    def computing(self, path: PromptPath, num_tokens: int) -> Iterator[Pending]:
        """Notes that an engine has a prompt, inside the block or until it is done."""
        raw = _raw_seconds(self.prefill, self.decode, num_tokens)[path]
        pending = Pending(num_tokens)
        self.num_chosen[path] += 1
        self._pending[path].add(pending)
        try:
            yield pending
        finally:
            self._pending[path].discard(pending)
            if pending.seconds is not None:
                self._corrections[path].observe(raw, pending.seconds)

    @contextlib.contextmanager
    def streaming(self, tpot_seconds: float) -> Iterator[None]:
        """Notes that an answer is generated, inside the block."""
        began_at = time.monotonic()
        self._streams[tpot_seconds] += 1
        try:
            yield
        finally:
            self._streams[tpot_seconds] -= 1
            self._stream_seconds.observe(time.monotonic() - began_at)

    @contextlib.contextmanager
    def awaiting_first_token(self, num_tokens: int, max_tokens: int) -> Iterator[None]:
        """Notes that a request of so many new prompt tokens has its place, inside the block."""
        self._asked_tokens.observe(min(max_tokens, _GUESSED_TOKENS))
        key = object()
        allowed = _LATE_IN_ALONE * self.alone_seconds(num_tokens)
        self._first_tokens[key] = time.monotonic() + allowed
        try:
            yield
        finally:
            del self._first_tokens[key]

    def overdue_seconds(self) -> float:
        """How long the one that has waited longest for its first token has done nothing else.

        Who comes now will hardly fare better, whatever was predicted.
        """
        return max(0.0, time.monotonic() - min(self._first_tokens.values(), default=math.inf))

    def ttft_seconds(self, num_tokens: int) -> float:
        """Time to the first token of a request that has its place; zero when nothing is known."""
        return self._fastest(self.prefill, self.decode, num_tokens)

    def alone_seconds(self, num_tokens: int) -> float:
        """The same on an idle machine."""
        return self._fastest(self._prefill, self._decode, num_tokens)

    def raw_wait_seconds(self, queue: Queue, num_tokens: int) -> float:
        """What a new request would wait for others, by what the engines have measured."""
        step_seconds = self._decode.step_seconds
        guess = self._asked_tokens.value * step_seconds
        stream_seconds = self._stream_seconds.value or guess
        # One holds its place in the batch a step longer than tokens come.
        queue = dataclasses.replace(queue, stream_seconds=stream_seconds + step_seconds)
        computing = self.ttft_seconds(num_tokens) - self.alone_seconds(num_tokens)
        return max(queue_seconds(queue, self.decode), computing)

    def wait_seconds(self, queue: Queue, num_tokens: int) -> float:
        """The same, as experience corrects it; zero when nobody is there to wait for."""
        predicted = self._waits.apply(self.raw_wait_seconds(queue, num_tokens))
        return max(predicted, self.overdue_seconds())

    def waited(self, raw_seconds: float, seconds: float) -> None:
        """Notes how long a request has waited that was expected to wait `raw_seconds`."""
        self._waits.observe(raw_seconds, max(0.0, seconds))

    def _fastest(self, prefill: PrefillLoad, decode: DecodeLoad, num_tokens: int) -> float:
        raw = _raw_seconds(prefill, decode, num_tokens)
        known = [p for p in PromptPath if raw[p] > 0.0 and self._forced in (None, p)]
        return min((self._corrections[p].apply(raw[p]) for p in known), default=0.0)

    def _pending_tokens(self, path: PromptPath) -> int:
        return sum(pending.num_left for pending in self._pending[path])


def _raw_seconds(
    prefill: PrefillLoad, decode: DecodeLoad, num_tokens: int
) -> dict[PromptPath, float]:
    """Before correction; zero for a path of which nothing is known."""
    return {
        PromptPath.PREFILL: prefill_seconds(prefill, num_tokens),
        PromptPath.EXTEND: extend_seconds(decode, num_tokens),
    }
