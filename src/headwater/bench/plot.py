"""A picture of bench rows: bytes per second of each, under the line of what memory gave."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path


def plot_roofline(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG or SVG, by the ending of `path`."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for fmt in dict.fromkeys(row["format"] for row in rows):
        mine = [row for row in rows if row["format"] == fmt]
        axes.plot([r["batch"] for r in mine], [r["gb_per_s"] for r in mine], "o-", label=fmt)
    roof = statistics.median(row["read_gb_per_s"] for row in rows)
    axes.axhline(roof, color="black", linestyle="--", label=f"memory read, {roof:.0f} GB/s")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("GB/s of weights")
    axes.set_title(f"{rows[0]['what']}, {rows[0]['shape']}, {rows[0]['threads']} threads")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
