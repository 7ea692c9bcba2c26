"""Stages that a request reaches in an engine's thread, kept until its span can take them.

Engines know no spans: they note, and the servicer writes the notes down in the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# A prompt of a million tokens in chunks of 2,048 has half as many; beyond it the latest are kept.
MAX_STAGES = 1024


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    unix_nano: int
    attributes: dict[str, int | float | str]


@dataclass(slots=True)
class Stages:
    """The stages of one request; keeps nothing unless it `is_kept`.

    One thread notes at a time; `write` is called when no more are noted, or misses the latest.
    """

    is_kept: bool = False
    _stages: list[_Stage] = field(default_factory=list)

    def note(self, name: str, **attributes: float | str) -> None:
        """The request reached a stage now."""
        if not self.is_kept:
            return
        if len(self._stages) == MAX_STAGES:
            del self._stages[0]
        self._stages.append(_Stage(name, time.time_ns(), dict(attributes)))

    def write(self, span: Span) -> None:
        """Makes them events of `span`, at their times; attributes become headwater.<name>."""
        for stage in list(self._stages):
            attributes = {f"headwater.{key}": value for key, value in stage.attributes.items()}
            span.add_event(stage.name, attributes, stage.unix_nano)
