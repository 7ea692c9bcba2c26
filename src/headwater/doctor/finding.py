"""What a check finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"

    @property
    def exit_status(self) -> int:
        """0, 1 and 2."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do about it."""

    topic: str
    level: Level
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(topic, Level.OK, text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(topic, Level.WARNING, text, remedy)


def error(topic: str, text: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(topic, Level.ERROR, text, remedy)
