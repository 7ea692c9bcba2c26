"""Finds stop strings in a text that comes in pieces.

Lets through at once everything that cannot be part of a stop string, and holds back the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown, and the stop string that ended the answer, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """The stop strings of one answer.

    The first stop string to be complete ends the answer; of several complete at the same
    character the longest counts. How the text is cut into pieces makes no difference.
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        self._needles = [_Needle(stop) for stop in stops]
        self._includes_stop = include_stop
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Takes the next piece of text; not to be called again after a match."""
        if not self._needles:
            return StopResult(text)
        pending = self._held + text
        for consumed, char in enumerate(text, start=len(self._held) + 1):
            complete = [needle.text for needle in self._needles if needle.push(char)]
            if complete:
                matched = max(complete, key=len)
                kept = consumed if self._includes_stop else consumed - len(matched)
                self._held = ""
                return StopResult(pending[:kept], matched)
        num_held = max(needle.num_matched for needle in self._needles)
        self._held = pending[len(pending) - num_held :]
        return StopResult(pending[: len(pending) - num_held])

    def flush(self) -> str:
        """The text held back, once it is certain that no more comes."""
        held, self._held = self._held, ""
        return held


class _Needle:
    """One stop string and how much of it the text's end matches (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # fallback[n]: the longest proper prefix of `text` that ends its first n + 1 characters.
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def push(self, char: str) -> bool:
        """Takes the next character; True when the stop string is complete."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == char
        return self.num_matched == len(self.text)
