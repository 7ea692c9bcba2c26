"""Where settings come from, and what is said when one is wrong.

Later sources win: defaults, then the TOML file (`--config`, else HEADWATER_CONFIG), then
environment variables (HEADWATER_ROUTER_LISTEN sets `listen` of section `router`), then flags
(`--set router.listen=...`). An unknown key is an error wherever it stands. The environment is read
here and nowhere else.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.config.devices import parse_devices
from headwater.config.schema import Config
from headwater.errors import ConfigError
from headwater.objectives import parse_objectives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import Field

ENV_PREFIX = "HEADWATER_"
CONFIG_VARIABLE = "HEADWATER_CONFIG"
# Read by the native core, not a setting of this object.
_NATIVE_VARIABLES = frozenset({"HEADWATER_FORCE_ISA"})

_SECTIONS: dict[str, type] = {field.name: field.default_factory for field in fields(Config)}  # type: ignore[misc]
# Of the time: with less, a layer of a prompt takes minutes.
_LEAST_SHARE = 0.05
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def load_config(
    *,
    config_file: str | None,
    environ: Mapping[str, str],
    assignments: Sequence[str] = (),
) -> Config:
    """Builds the configuration; `assignments` are "section.key=value" from flags.

    Raises ConfigError naming source, key, value and remedy.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    file_name = config_file or environ.get(CONFIG_VARIABLE)
    if file_name:
        _take_file(values, Path(file_name).expanduser())
    _take_environment(values, environ)
    for assignment in assignments:
        _take_assignment(values, assignment)
    return Config(**{name: kind(**values[name]) for name, kind in _SECTIONS.items()})


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that load_config reads back to an equal object."""
    lines: list[str] = []
    for section in _SECTIONS:
        lines.append(f"[{section}]")
        part = getattr(config, section)
        lines += [f"{key} = {json.dumps(getattr(part, key))}" for key in _keys(section)]
        lines.append("")
    return "\n".join(lines)


def _keys(section: str) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(_SECTIONS[section])}


def _take_file(values: dict[str, dict[str, Any]], path: Path) -> None:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    for section, entries in table.items():
        if section not in _SECTIONS:
            raise ConfigError(
                f"{path}: unknown section [{section}]; the sections are {', '.join(_SECTIONS)}"
            )
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {section} must be a section, written as [{section}]")
        for key, value in entries.items():
            _take(values, section, key, value, source=str(path))


def _take_environment(values: dict[str, dict[str, Any]], environ: Mapping[str, str]) -> None:
    known = {
        f"{ENV_PREFIX}{section}_{key}".upper(): (section, key)
        for section in _SECTIONS
        for key in _keys(section)
    }
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable in _NATIVE_VARIABLES:
            continue
        if variable not in known:
            raise ConfigError(
                f"environment variable {variable}: unknown setting; {_suggest(variable, known)}"
            )
        section, key = known[variable]
        _take(values, section, key, text, source=f"environment variable {variable}")


def _take_assignment(values: dict[str, dict[str, Any]], assignment: str) -> None:
    name, equals, text = assignment.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {assignment}: must have the form section.key=value")
    if section not in _SECTIONS:
        raise ConfigError(
            f"--set {assignment}: unknown section {section}; the sections are "
            f"{', '.join(_SECTIONS)}"
        )
    _take(values, section, key, text, source="--set")


def _take(
    values: dict[str, dict[str, Any]], section: str, key: str, value: Any, *, source: str
) -> None:
    keys = _keys(section)
    if key not in keys:
        raise ConfigError(
            f"{source}: unknown key {section}.{key}; section [{section}] has {', '.join(keys)}"
        )
    where = f"{source}: {section}.{key}"
    values[section][key] = _checked(where, keys[key], value)


def _checked(where: str, field: Field[Any], value: Any) -> Any:
    value = _converted(where, type(field.default), value)
    limits = field.metadata
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{where}: must be one of {', '.join(limits['choices'])}, got {value!r}")
    if "low" in limits and not limits["low"] <= value <= limits["high"]:
        raise ConfigError(
            f"{where}: must be between {limits['low']} and {limits['high']}, got {value!r}"
        )
    kind = limits.get("kind")
    if kind == "address" or (kind == "optional_address" and value):
        _check_address(where, value)
    if kind == "objectives":
        _check_objectives(where, value)
    if kind == "share" and 0.0 < value < _LEAST_SHARE:
        raise ConfigError(
            f"{where}: must be 0, or at least {_LEAST_SHARE} so that prompts get on, got {value!r}"
        )
    if kind == "devices":
        try:
            parse_devices(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    if kind == "shm_prefix" and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", value):
        raise ConfigError(
            f"{where}: must be 1 to 64 letters, digits, '_' or '-', starting with a letter or "
            f"digit, got {value!r}"
        )
    if kind == "path" and not value:
        raise ConfigError(f"{where}: must not be empty")
    return value


def _converted(where: str, kind: type, value: Any) -> Any:
    """Turns text into `kind` and checks the type of what TOML gave."""
    if isinstance(value, str) and kind is not str:
        try:
            if kind is bool:
                return _BOOLS[value.lower()]
            number = kind(value)
        except (KeyError, ValueError):
            raise ConfigError(f"{where}: expected {_noun(kind)}, got {value!r}") from None
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        number = float(value)
    elif type(value) is kind:
        number = value
    else:
        raise ConfigError(f"{where}: expected {_noun(kind)}, got {value!r}")
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{where}: must be finite, got {value!r}")
    return number


def _noun(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]


def _check_address(where: str, value: str) -> None:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(
            f"{where}: must have the form host:port with a port from 0 to 65535, got {value!r}"
        )


def _check_objectives(where: str, value: str) -> None:
    try:
        parse_objectives(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _suggest(variable: str, known: Mapping[str, object]) -> str:
    section = variable.removeprefix(ENV_PREFIX).partition("_")[0].lower()
    siblings = [name for name in known if name.startswith(f"{ENV_PREFIX}{section.upper()}_")]
    if siblings:
        return f"section [{section}] has {', '.join(siblings)}"
    return f"variables are {ENV_PREFIX}<SECTION>_<KEY> with sections {', '.join(_SECTIONS)}"
