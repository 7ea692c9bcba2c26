"""`headwater synth`: a checkpoint of a published shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.progress import progress_bar

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config


def synth(arguments: argparse.Namespace, config: Config) -> int:  # noqa: ARG001
    """Writes the folder. Raises ConfigError for a shape or a folder that cannot be."""
    from headwater.convert.linear_formats import LinearTarget
    from headwater.synth.checkpoint import write_synthetic
    from headwater.synth.shapes import make_config

    settings = make_config(arguments.shape, arguments.arch, arguments.layers, arguments.experts)
    out = Path(arguments.out)
    with progress_bar(f"writing {out}") as show:
        target = LinearTarget(arguments.format, arguments.group)
        num_bytes = write_synthetic(out, settings, target, on_progress=show)
    print(f"wrote {out}, {num_bytes / 2**30:.2f} GiB; serve it with: headwater up --model {out}")
    return 0
