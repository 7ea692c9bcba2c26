"""Classes of service objectives, as the configuration names them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from headwater.errors import ConfigError

_CLASS = re.compile(r"([A-Za-z0-9_-]{1,64})=([0-9.eE+-]+)/([0-9.eE+-]+)")


@dataclass(frozen=True, slots=True)
class Objective:
    """What a class of requests is promised, in seconds: the time to the first token, and the time
    per token after it, on average over an answer.
    """

    name: str
    ttft_seconds: float
    tpot_seconds: float


def parse_objectives(text: str) -> dict[str, Objective]:
    """Reads "name=TTFT/TPOT, ...", at least one; by name, in the order given.

    Raises ConfigError that names the class, not the setting.
    """
    found: dict[str, Objective] = {}
    for part in text.split(","):
        match = _CLASS.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{part.strip()!r} must have the form name=TTFT/TPOT in seconds, such as "
                "interactive=30/0.05"
            )
        name = match[1]
        if name in found:
            raise ConfigError(f"class {name} is there twice")
        found[name] = Objective(name, _seconds(name, match[2]), _seconds(name, match[3]))
    return found


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"class {name}: expected a number of seconds, got {text!r}") from None
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"class {name}: must be positive and finite, got {text}")
    return value
