"""`headwater convert`: a GGUF file becomes a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.progress import progress_bar

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config


def convert(arguments: argparse.Namespace, config: Config) -> int:  # noqa: ARG001
    """Writes the folder. Raises CheckpointError when the file is not what it should be."""
    from headwater.convert.gguf import convert_gguf

    with progress_bar(f"converting {arguments.gguf}") as show:
        convert_gguf(Path(arguments.gguf), Path(arguments.out), arguments.format, on_progress=show)
    print(f"wrote {arguments.out}; serve it with: headwater up --model {arguments.out}")
    return 0
