"""`headwater bench`: our kernels and models against what the machine can do, in the same run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.bench_output import write_figures
from headwater.cli.table import print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from headwater.config import Config

_COLUMNS = (
    "what",
    "shape",
    "format",
    "batch",
    "threads",
    "isa",
    "us",
    "gb_per_s",
    "read_gb_per_s",
    "ratio",
    "tokens_per_s",
)


def bench(arguments: argparse.Namespace, config: Config) -> int:
    """Prints a table; writes JSON and a picture where asked to."""
    rows = []
    for row in _measure(arguments, config):
        rows.append(row)
        print(f"{row['what']} {row['format']} batch {row['batch']}: done", file=sys.stderr)
    write_figures(arguments.json, rows)
    if arguments.plot:
        from headwater.bench.plot import plot_roofline

        plot_roofline(rows, Path(arguments.plot))
    print_table([name.upper() for name in _COLUMNS], [_cells(row) for row in rows])
    return 0


def _measure(arguments: argparse.Namespace, config: Config) -> Iterator[dict[str, Any]]:
    threads = arguments.threads or len(os.sched_getaffinity(0))
    if arguments.subject == "moe":
        from headwater.bench.moe import bench_moe

        for fmt in arguments.format:
            for batch in arguments.batch:
                yield bench_moe(arguments.shape, fmt, batch, threads, experts=arguments.experts)
    elif arguments.subject == "kernels":
        from headwater.bench.kernels import bench_kernel

        for fmt in arguments.format:
            for batch in arguments.batch:
                yield bench_kernel(fmt, batch)
    else:
        from headwater.bench.model import bench_model
        from headwater.cli.model import with_model

        folder = Path(with_model(config).model.path)
        for batch in arguments.batch:
            yield bench_model(folder, arguments.subject, batch, threads)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{value:.3g}" if isinstance(value := row[name], float) else str(value) for name in _COLUMNS
    ]
