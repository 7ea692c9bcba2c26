"""`headwater bench dslp`: prompts through several GPUs together, against one of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from headwater.cli.bench_output import write_figures
from headwater.cli.table import print_table

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config

_COLUMNS = ("what", "rank", "tokens", "ttft_s", "speedup", "h2d_ratio", "exchange_share")


def bench_dslp(arguments: argparse.Namespace, config: Config) -> int:
    """Prints a table; writes JSON after each row. Raises ConfigError without enough GPUs."""
    from headwater.bench.gpu.dslp import bench_dslp as measure

    rows: list[dict[str, Any]] = []
    for row in measure(
        arguments.shape,
        arguments.tokens,
        arguments.tokens,
        ranks=arguments.ranks,
        distinct=arguments.distinct,
        vram_gib=arguments.vram,
        quantize_from=config.gpu.quantize_from,
    ):
        rows.append(row)
        write_figures(arguments.json, rows)
        print(f"{row['what']}: {row.get('tokens', '')} done", file=sys.stderr)
    print_table(
        [name.upper() for name in _COLUMNS],
        [[_cell(row.get(name)) for name in _COLUMNS] for row in rows if "tokens" in row],
    )
    return 0


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
