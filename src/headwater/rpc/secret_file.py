"""Files that only we may read: private keys and API keys."""

from __future__ import annotations

import stat
from pathlib import Path

from headwater.errors import ConfigError


def read_file(setting: str, name: str) -> bytes:
    """Raises ConfigError, naming setting and file, when it cannot be read or is empty."""
    path = Path(name).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path} cannot be read: {error.strerror}; correct the path, or let this "
            "user read it"
        ) from error
    if not content.strip():
        raise ConfigError(f"{setting}: {path} is empty")
    return content


def read_secret(setting: str, name: str) -> bytes:
    """The same; refuses a file that everybody on the machine may read or change.

    The group may read it: that is how Kubernetes hands secrets to a user.
    """
    content = read_file(setting, name)
    path = Path(name).expanduser()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(
            f"{setting}: {path} has mode {mode:04o}, so that others can read or change it; "
            f"`chmod 600 {path}`, and replace the key if others may have seen it"
        )
    return content
