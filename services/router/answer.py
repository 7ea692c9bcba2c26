"""Puts one answer together: tokens to text, stop strings, counts and times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headwater.generation import FinishReason, TextEvent, Timings, Token, TokenEvent
from headwater.services.router.text.detokenizer import Detokenizer
from headwater.services.router.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from headwater.services.router.requests import RouterRequest
    from headwater.services.router.text.tokenizer import TokenBytes


class Answer:
    """The answer to one request, as far as it goes."""

    def __init__(self, request: RouterRequest, vocabulary: TokenBytes) -> None:
        sampling = request.sampling
        self._needs_text = request.wants_text or bool(sampling.stop)
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=request.skip_special_tokens)
        self._stops = StopStrings(sampling.stop, include_stop=sampling.include_stop)
        self.num_tokens = 0

    def take(self, event: TokenEvent) -> TextEvent:
        """What the caller gets for the tokens of `event`; the last one has a finish reason."""
        taken: list[Token] = []
        pieces: list[str] = []
        matched = None
        for token in event.tokens:
            taken.append(token)
            is_stop_token = token is event.tokens[-1] and token.id == event.stop_token_id
            if is_stop_token or not self._needs_text:
                continue
            result = self._stops.push(self._detokenizer.push(token.id))
            pieces.append(result.text)
            matched = result.matched
            if matched is not None:
                break
        self.num_tokens += len(taken)
        if matched is not None:
            return TextEvent("".join(pieces), tuple(taken), FinishReason.STOP, matched_stop=matched)
        if event.finish_reason is not None:
            pieces.append(self._stops.flush())
        return TextEvent(
            "".join(pieces),
            tuple(taken),
            event.finish_reason,
            stop_token_id=event.stop_token_id,
        )


class Stopwatch:
    """When the request reached which stage; starts at its arrival."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self._admitted: float | None = None
        self._prefilled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    def admitted(self) -> None:
        """The request leaves the queue."""
        self._admitted = self._admitted or time.monotonic()

    def prefilled(self) -> None:
        """The prompt is computed."""
        self._prefilled = self._prefilled or time.monotonic()

    def token(self) -> float:
        """A token has come; returns when, a time.monotonic() value."""
        self._last_token = time.monotonic()
        if self._first_token is None:
            self._first_token = self._last_token
            # Where decode computes the prompt there is no hand-over.
            self.prefilled()
        return self._last_token

    def queue_seconds(self) -> float:
        """Time from arrival to admission."""
        return _between(self.arrived, self._admitted)

    def held_seconds(self) -> float:
        """Time since admission."""
        return _between(self._admitted, time.monotonic())

    def total_seconds(self) -> float:
        """Time since arrival."""
        return time.monotonic() - self.arrived

    def timings(self) -> Timings:
        """Durations up to now; zero for a stage not reached."""
        return Timings(
            queue_seconds=self.queue_seconds(),
            prefill_seconds=_between(self._admitted, self._prefilled),
            handover_seconds=_between(self._prefilled, self._first_token),
            decode_seconds=_between(self._first_token, self._last_token),
            time_to_first_token_seconds=_between(self.arrived, self._first_token),
            total_seconds=self.total_seconds(),
        )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start
