"""Reads typed, range-checked fields from a parsed config.json.

Owns the wording of what is wrong with a field; knows no field by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn, cast

from headwater.errors import CheckpointError

# Far above any published model, far below what would overflow sizes computed from it.
MAX_DIMENSION = 1 << 24


class ConfigFields:
    """One JSON object of a config file; `source` names the file in messages.

    A field that is null counts as missing. Every method raises CheckpointError, naming file, field
    and value, when the field is missing without a default, of the wrong type or out of range.
    """

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def names(self) -> tuple[str, ...]:
        """The names of all fields that are there."""
        return tuple(self._values)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raises CheckpointError about the field `name`: '<file>: <field> <problem>'."""
        raise CheckpointError(f"{self._source}: {self._prefix}{name} {problem}")

    def integer(
        self,
        name: str,
        low: int = 1,
        high: int = MAX_DIMENSION,
        *,
        high_name: str | None = None,
        default: int | None = None,
    ) -> int:
        """An integer in [low, high]; `high_name` says which other field sets `high`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong_type(name, value, "an integer")
        if not low <= value <= high:
            bound = f"{high_name} ({high})" if high_name else str(high)
            self.fail(name, f"is {value}, must be between {low} and {bound}")
        return value

    def number(self, name: str, low: float, high: float, *, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong_type(name, value, "a number")
        if not (math.isfinite(value) and low <= value <= high):
            self.fail(name, f"is {value!r}, must be between {low:g} and {high:g}")
        return float(value)

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """A JSON true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            self._wrong_type(name, value, "true or false")
        return value

    def string(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            self._wrong_type(name, value, "a string")
        return value

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high]; missing means empty, one integer a list of one."""
        if not self.has(name):
            return ()
        value = self._values[name]
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                self._wrong_type(name, value, "an integer or a list of integers")
            if not low <= item <= high:
                self.fail(name, f"holds {item}, must be between {low} and {high}")
        return tuple(items)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; missing means empty."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong_type(name, value, "a list of strings")
        return tuple(value)

    def section(self, name: str) -> ConfigFields | None:
        """The nested object `name`; None when it is missing."""
        if not self.has(name):
            return None
        value = self._values[name]
        if not isinstance(value, dict):
            self._wrong_type(name, value, "an object")
        return ConfigFields(
            cast("dict[str, object]", value), self._source, f"{self._prefix}{name}."
        )

    def require(self, name: str, allowed: object) -> None:
        """Refuses any value but `allowed`; a missing field is fine."""
        value = self._values.get(name)
        if value is not None and (
            value != allowed or isinstance(value, bool) != isinstance(allowed, bool)
        ):
            self.fail(name, f"is {value!r}, and only {allowed!r} is supported")

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            self.fail(name, "is missing")
        return default

    def _wrong_type(self, name: str, value: object, expected: str) -> NoReturn:
        self.fail(name, f"is {value!r}, must be {expected}")
