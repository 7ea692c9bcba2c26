"""`headwater bench serve`: a running stack, or any OpenAI endpoint, under load."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.bench.serve.load import LengthMix, draw_requests, poisson_times, read_trace
from headwater.bench.serve.run import Run, run_closed, run_open
from headwater.bench.serve.scenarios import run_interference, run_subject, standard_set
from headwater.bench.serve.stats import Objectives, Spread, Summary, summarise, variation
from headwater.bench.serve.target import OpenAiTarget, RouterTarget
from headwater.cli.bench_output import write_figures
from headwater.cli.table import print_table
from headwater.errors import ConfigError
from headwater.rpc.link import Link

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from headwater.bench.serve.load import LoadRequest
    from headwater.bench.serve.target import ModelLimits, Target
    from headwater.config import Config

_LOAD_TITLES = (
    "LOAD",
    "REQUESTS",
    "DONE",
    "ERRORS",
    "TTFT P50",
    "P99 MS",
    "TPOT P50",
    "P99 MS",
    "ITL P99 MS",
    "TOKENS/S",
    "CV %",
    "REQ/S",
    "IN TIME %",
    "GOODPUT/S",
)
_PLOTTED = {
    "standard": ("ttft_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"),
    "mixed": ("alone_tpot_seconds", "beside_tpot_seconds", "ratio"),
}


def bench_serve(arguments: argparse.Namespace, config: Config) -> int:
    """Prints a table; writes JSON and a picture where asked to. Raises HeadwaterError."""
    return asyncio.run(_bench(arguments, config))


async def _bench(arguments: argparse.Namespace, config: Config) -> int:
    target = _target(arguments, config)
    try:
        limits = await target.limits()
        if arguments.scenario is None:
            await _loads(arguments, target, limits)
        else:
            await _scenario(arguments, target, limits)
    finally:
        await target.close()
    return 0


def _target(arguments: argparse.Namespace, config: Config) -> Target:
    if arguments.openai is None:
        return RouterTarget(config.router.listen, Link.of(config))
    if arguments.model_name is None:
        raise ConfigError("--openai: needs --model-name, the model to ask for")
    return OpenAiTarget(
        arguments.openai, arguments.model_name, max_context_tokens=arguments.context_tokens
    )


async def _scenario(arguments: argparse.Namespace, target: Target, limits: ModelLimits) -> None:
    rows = []
    if arguments.scenario == "mixed":
        rows.append(
            await run_interference(
                target,
                limits,
                prompt_tokens=arguments.prompt_tokens,
                repeats=arguments.repeats,
                seed=arguments.seed,
            )
        )
    else:
        subjects, notes = standard_set(limits)
        for note in notes:
            print(note, file=sys.stderr)
        for subject in subjects:
            rows.append(
                await run_subject(
                    target,
                    limits,
                    subject,
                    warm_ups=arguments.warm_ups,
                    repeats=arguments.repeats,
                    seed=arguments.seed,
                )
            )
            print(f"{subject.name}: done", file=sys.stderr)
    write_figures(arguments.json, rows)
    if arguments.plot:
        from headwater.bench.serve.plot import plot_rows

        plot_rows(rows, _PLOTTED[arguments.scenario], Path(arguments.plot))
    titles = [name.upper().replace("_", " ") for name in rows[0]]
    print_table(titles, [[_cell(value) for value in row.values()] for row in rows])


async def _loads(arguments: argparse.Namespace, target: Target, limits: ModelLimits) -> None:
    objectives = Objectives(arguments.ttft, arguments.tpot)
    runs, summaries, variations, figures = [], [], [], []
    for name, concurrency, rate in _points(arguments):
        repeats = []
        for turn in range(-arguments.warm_ups, arguments.repeats):
            requests = _requests(arguments, limits, rate, turn)
            if turn < 0 and arguments.trace is None:
                requests = requests[: max(concurrency or 1, 4)]
            run = (
                await run_closed(target, requests, concurrency)
                if concurrency
                else await run_open(target, requests)
            )
            if turn >= 0:
                repeats.append(run)
        pooled = Run(
            tuple(outcome for run in repeats for outcome in run.outcomes),
            sum(run.seconds for run in repeats),
        )
        each = [summarise(name, run, objectives) for run in repeats]
        runs.append(pooled)
        summaries.append(summarise(name, pooled, objectives))
        variations.append(variation([summary.output_tokens_per_second for summary in each]))
        figures.append(
            summaries[-1].as_dict()
            | {"throughput_variation": variations[-1], "repeats": [one.as_dict() for one in each]}
        )
        print(f"{name}: done", file=sys.stderr)
    for run in runs:
        _report_errors(run)
    goals = dataclasses.asdict(objectives)
    write_figures(arguments.json, {"model": limits.name, "objectives": goals, "loads": figures})
    if arguments.plot:
        from headwater.bench.serve.plot import plot_loads

        plot_loads(summaries, runs, Path(arguments.plot))
    print_table(_LOAD_TITLES, [_row(s, v) for s, v in zip(summaries, variations, strict=True)])


def _points(arguments: argparse.Namespace) -> list[tuple[str, int | None, float | None]]:
    """Name, concurrency and rate of each load; a trace has neither."""
    if arguments.trace is not None:
        return [("trace", None, None)]
    if arguments.rate is not None:
        return [(f"{rate:g}/s", None, rate) for rate in arguments.rate]
    return [(f"{count} at once", count, None) for count in arguments.concurrency or [1]]


def _requests(
    arguments: argparse.Namespace, limits: ModelLimits, rate: float | None, turn: int
) -> Sequence[LoadRequest]:
    if arguments.trace is not None:
        requests, num_cut = read_trace(
            Path(arguments.trace),
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            speed=arguments.speed,
        )
        if num_cut and turn == 0:
            print(
                f"{num_cut} of {len(requests)} requests were cut: the model's context holds "
                f"{limits.max_context_tokens} tokens",
                file=sys.stderr,
            )
        return requests
    # Another seed each time, or the prefix cache would answer for the engine.
    seed = 1000 * arguments.seed + turn
    requests = draw_requests(
        [LengthMix.parse(text) for text in arguments.mix],
        arguments.requests,
        vocab_size=limits.vocab_size,
        max_context_tokens=limits.max_context_tokens,
        shared_tokens=arguments.shared_tokens,
        seed=seed,
    )
    if rate is None:
        return requests
    times = poisson_times(rate, seed)
    return [dataclasses.replace(request, at_seconds=next(times)) for request in requests]


def _report_errors(run: Run) -> None:
    """One line per kind of error: what the server said first."""
    said: dict[str, str] = {}
    for outcome in run.outcomes:
        if outcome.error is not None:
            said.setdefault(outcome.error, outcome.message)
    for reason, message in said.items():
        print(f"{reason}, for example: {message}", file=sys.stderr)


def _row(summary: Summary, spread: float) -> list[str]:
    errors = ", ".join(f"{count} {reason}" for reason, count in summary.errors.items())
    return [
        summary.load,
        str(summary.num_requests),
        str(summary.num_completed),
        errors or "0",
        *_milliseconds(summary.ttft),
        *_milliseconds(summary.tpot),
        f"{1000 * summary.itl.p99:.1f}",
        f"{summary.output_tokens_per_second:.1f}",
        f"{100 * spread:.1f}",
        f"{summary.requests_per_second:.2f}",
        f"{100 * summary.attainment:.1f}",
        f"{summary.goodput_per_second:.2f}",
    ]


def _milliseconds(spread: Spread) -> tuple[str, str]:
    return f"{1000 * spread.p50:.1f}", f"{1000 * spread.p99:.1f}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
