"""Folders that appear when they are complete, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.errors import ConfigError


@contextmanager
def new_folder(out_dir: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `out_dir`, which takes its name at the end, without an error.

    Raises ConfigError when `out_dir` exists, when it cannot be written, and, with the exact
    shortfall, when the disk has no room for `needed_bytes`.
    """
    if out_dir.exists():
        raise ConfigError(f"{out_dir}: exists already; remove it or choose another folder")
    building = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        _check_room(out_dir, building, needed_bytes)
        yield building
        building.rename(out_dir)
    except OSError as error:
        raise ConfigError(f"{out_dir}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check_room(out_dir: Path, building: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(building).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{out_dir}: the disk is too small: needs {needed_bytes} bytes, has {free_bytes} free, "
            f"{needed_bytes - free_bytes} short; free some, or choose another folder or a smaller "
            "model"
        )
