"""`headwater convert`: a GGUF file or a checkpoint folder becomes a checkpoint folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.progress import progress_bar
from headwater.cli.table import print_table

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config
    from headwater.convert.folder import ConversionReport, Modules


def convert(arguments: argparse.Namespace, config: Config) -> int:  # noqa: ARG001
    """Writes the folder. Raises CheckpointError when the source is not what it should be."""
    source, out = Path(arguments.source), Path(arguments.out)
    if source.is_dir():
        _convert_folder(source, out, arguments)
    else:
        _convert_gguf(source, out, arguments)
    print(f"wrote {out}; serve it with: headwater up --model {out}")
    return 0


def _convert_gguf(source: Path, out: Path, arguments: argparse.Namespace) -> None:
    from headwater.convert.gguf import convert_gguf

    if arguments.format in ("bf16", "fp8"):
        with progress_bar(f"converting {source}") as show:
            convert_gguf(source, out, arguments.format, on_progress=show)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        dense = Path(scratch) / "bf16"
        with progress_bar(f"reading {source}") as show:
            convert_gguf(source, dense, "bf16", on_progress=show)
        _convert_folder(dense, out, arguments)


def _convert_folder(source: Path, out: Path, arguments: argparse.Namespace) -> None:
    from headwater.convert.folder import convert_folder
    from headwater.convert.linear_formats import LinearTarget

    # Four bits cost attention much and save little: the experts are nearly all of a model.
    modules: Modules = arguments.modules or (
        "all" if arguments.format in ("bf16", "fp8") else "experts"
    )
    with progress_bar(f"converting {source}") as show:
        report = convert_folder(
            source, out, LinearTarget(arguments.format, arguments.group), modules, on_progress=show
        )
    _print_report(report)


def _print_report(report: ConversionReport) -> None:
    errors = [(name, f"{error:.5f}") for name, error in report.errors.items()]
    print_table(("WEIGHTS", "RELATIVE L2 ERROR"), errors)
    print(f"\n{report.num_bytes / 2**30:.2f} GiB")
    if report.left_out:
        print(
            f"left out {len(report.left_out)} tensors that are not part of the model, such as "
            f"{report.left_out[0]}"
        )
