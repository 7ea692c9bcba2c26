"""Which model is served: the configured folder, or the embedded default, converted when needed.

`headwater model` makes sure that it is there, before services that may only read it start.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.progress import progress_bar
from headwater.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


def model(arguments: argparse.Namespace, config: Config) -> int:  # noqa: ARG001
    """Prints name and folder. Raises as `with_model` does."""
    found = with_model(config).model
    print(f"{found.name}  {found.path}")
    return 0


def with_model(config: Config) -> Config:
    """The configuration with `model.path` and `model.name` filled in.

    Raises ConfigError when the folder is not there, CheckpointError when the default model cannot
    be made.
    """
    if config.model.path:
        path = Path(config.model.path).expanduser().resolve()
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.path: {path} has no config.json; give a checkpoint folder")
        name = config.model.name or path.name
    else:
        path = _default_model(config)
        name = config.model.name or DEFAULT_MODEL_NAME
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, path=str(path), name=name)
    )


def _default_model(config: Config) -> Path:
    from headwater.convert.default_model import ensure_default_model

    cache_dir = Path(config.state.cache_dir).expanduser()
    with progress_bar(f"converting {DEFAULT_MODEL_NAME}") as on_progress:
        return ensure_default_model(cache_dir, config.model.format, on_progress=on_progress)
