"""A picture of a run: who waited how long, and what came out per second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from headwater.bench.serve.stats import gaps, ttft

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from headwater.bench.serve.run import Run
    from headwater.bench.serve.stats import Summary


def plot_loads(summaries: Sequence[Summary], runs: Sequence[Run], path: Path) -> None:
    """Writes a PNG or SVG, by the ending of `path`; one run per summary."""
    figure, (first, step, rate) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for summary, run in zip(summaries, runs, strict=True):
        done = [outcome for outcome in run.outcomes if outcome.error is None]
        _distribution(first, [v for o in done if (v := ttft(o)) is not None], summary.load)
        _distribution(step, [gap for o in done for gap in gaps(o)], summary.load)
    first.set_title("time to first token")
    step.set_title("time between tokens")
    first.legend()
    places = range(len(summaries))
    rate.bar(places, [s.output_tokens_per_second for s in summaries])
    rate.set_xticks(list(places), [s.load for s in summaries])
    rate.set_ylabel("output tokens/s")
    rate.set_title("throughput, and share of requests within their objectives")
    share = rate.twinx()
    share.plot(places, [100 * s.attainment for s in summaries], "o-", color="black")
    share.set_ylim(0, 105)
    share.set_ylabel("%")
    figure.savefig(path)
    plt.close(figure)


def _distribution(axes: Any, values: Sequence[float], label: str) -> None:
    if not values:
        return
    milliseconds = 1000 * np.sort(np.asarray(values))
    axes.plot(milliseconds, np.arange(1, len(values) + 1) / len(values), label=label)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("share of requests" if not axes.get_ylabel() else axes.get_ylabel())


def plot_rows(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Bars of the columns `names` of rows that each have a load; PNG or SVG."""
    figure, panels = plt.subplots(
        1, len(names), figsize=(5 * len(names), 4), layout="constrained", squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        axes.bar([row["load"] for row in rows], [row[name] for row in rows])
        axes.set_title(name.replace("_", " "))
    figure.savefig(path)
    plt.close(figure)
