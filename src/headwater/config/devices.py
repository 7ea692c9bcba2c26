"""The form in which a setting names devices."""

from __future__ import annotations

import re

from headwater.errors import ConfigError

_MOST_DEVICES = 16


def parse_devices(text: str) -> tuple[str, ...]:
    """`cuda:0, cuda:1` -> their names; `auto` -> none, for whoever sees the devices to say.

    Raises ConfigError for any other form.
    """
    if text.strip() == "auto":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if len(names) > _MOST_DEVICES or not all(
        re.fullmatch(r"cpu|cuda:([0-9]|[1-9][0-9])", n) for n in names
    ):
        raise ConfigError(
            f"must be auto, or up to {_MOST_DEVICES} devices such as cuda:0, cuda:1 or cpu, got "
            f"{text!r}"
        )
    if len({name.partition(":")[0] for name in names}) > 1:
        raise ConfigError(f"CPUs and GPUs cannot share a prompt, got {text!r}")
    return names
