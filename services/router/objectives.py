"""The classes of service objectives that this router serves, and how far it has met them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import ConfigError, InvalidRequestError
from headwater.objectives import Objective, parse_objectives
from headwater.telemetry.metrics import record_outcome, record_shed

if TYPE_CHECKING:
    from headwater.generation import Timings, Usage


@dataclass(slots=True)
class Attainment:
    """What became of the requests of one class."""

    objective: Objective
    num_finished: int = 0
    num_attained: int = 0
    num_missed_ttft: int = 0
    num_missed_tpot: int = 0
    num_shed: int = 0

    def finished(self, usage: Usage, timings: Timings) -> None:
        """Counts an answer that ended well."""
        is_early = timings.time_to_first_token_seconds <= self.objective.ttft_seconds
        gaps = usage.completion_tokens - 1
        is_fast = gaps < 1 or timings.decode_seconds / gaps <= self.objective.tpot_seconds
        self.num_finished += 1
        self.num_attained += is_early and is_fast
        self.num_missed_ttft += not is_early
        self.num_missed_tpot += not is_fast
        record_outcome(self.objective.name, is_early=is_early, is_fast=is_fast)

    def shed(self) -> None:
        """Counts a request that was refused for lack of time or room."""
        self.num_shed += 1
        record_shed(self.objective.name)


class Objectives:
    """The classes by name."""

    def __init__(self, classes: str, default_class: str) -> None:
        """Raises ConfigError when a class is not well-formed or the default is none of them."""
        self._by_name = {
            name: Attainment(objective) for name, objective in parse_objectives(classes).items()
        }
        if default_class not in self._by_name:
            raise ConfigError(
                f"objectives.default_class: must be one of {', '.join(self._by_name)}, got "
                f"{default_class!r}"
            )
        self._default = self._by_name[default_class]

    @property
    def all(self) -> tuple[Attainment, ...]:
        """Every class, in the order of the configuration."""
        return tuple(self._by_name.values())

    def of(self, name: str) -> Attainment:
        """The class of that name; the default one for none. Raises InvalidRequestError."""
        if not name:
            return self._default
        found = self._by_name.get(name)
        if found is None:
            raise InvalidRequestError(
                "objective_class", f"must be one of {', '.join(self._by_name)}, got {name!r}"
            )
        return found
