"""The command line of `headwater bench` and of its subjects."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_KERNEL_SUBJECTS = {
    "kernels": "one matrix product per format, in cache",
    "moe": "the routed experts of one layer",
    "decode": "whole decode steps of the model",
    "prefill": "whole prompts through the model",
}


def add_bench_subjects(
    parser: argparse.ArgumentParser,
    *,
    settings: argparse.ArgumentParser,
    formats: Sequence[str],
) -> None:
    """Adds the subjects to the parser of `headwater bench`; each takes the settings' flags."""
    subjects = parser.add_subparsers(dest="subject", required=True)
    for name, help_text in _KERNEL_SUBJECTS.items():
        subject = subjects.add_parser(
            name, parents=[settings], help=help_text, description=help_text
        )
        subject.set_defaults(module="bench", function="bench")
        subject.add_argument("--shape", default="deepseek-v3", help="of moe; default deepseek-v3")
        subject.add_argument("--format", nargs="+", choices=formats, default=["fp8"])
        subject.add_argument("--batch", nargs="+", type=int, default=[1], help="tokens at once")
        subject.add_argument("--threads", type=int, help="default: one per usable core")
        subject.add_argument(
            "--experts",
            type=int,
            default=16,
            help="resident experts of moe, default 16; with 16 times as many as a token chooses "
            "products are those of sparse layers",
        )
        _add_outputs(subject)
    help_text = "prompts through several GPUs together, against one of them"
    _add_dslp(
        subjects.add_parser("dslp", parents=[settings], help=help_text, description=help_text)
    )
    help_text = "a running stack, or any OpenAI endpoint, under load"
    _add_serve(
        subjects.add_parser("serve", parents=[settings], help=help_text, description=help_text)
    )


def _add_dslp(dslp: argparse.ArgumentParser) -> None:
    dslp.set_defaults(module="bench_dslp", function="bench_dslp")
    dslp.add_argument("--shape", default="deepseek-v3", help="with random weights in FP8")
    dslp.add_argument(
        "--tokens", nargs="+", type=_at_least_one, default=[8192, 65536], help="of each prompt"
    )
    dslp.add_argument("--ranks", type=_at_least_one, default=2, help="GPUs; default 2")
    dslp.add_argument(
        "--distinct", type=_at_least_one, default=3, help="routed layers that differ; default 3"
    )
    dslp.add_argument(
        "--vram", type=_above_zero, default=32.0, help="GiB of each GPU to use; default 32"
    )
    dslp.add_argument("--json", metavar="FILE", help="write the figures to a file")


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.set_defaults(module="bench_serve", function="bench_serve")
    load = serve.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        nargs="+",
        type=_at_least_one,
        metavar="N",
        help="closed loop: keep so many requests under way; default 1",
    )
    load.add_argument(
        "--rate",
        nargs="+",
        type=_above_zero,
        metavar="R",
        help="open loop: so many requests per second, at random times (Poisson)",
    )
    load.add_argument(
        "--trace", metavar="FILE", help="open loop: times and lengths of a JSONL file"
    )
    load.add_argument(
        "--scenario",
        choices=("standard", "mixed"),
        help="standard: prose, code, prefill-10k, prefill-90k; mixed: what a stream feels of "
        "somebody's long prompts",
    )
    serve.add_argument(
        "--mix",
        nargs="+",
        default=["128:64"],
        metavar="PROMPT:OUTPUT[:WEIGHT]",
        help="lengths in tokens, each N or LOW-HIGH; default 128:64",
    )
    serve.add_argument("--requests", type=_at_least_one, default=32, help="per load; default 32")
    serve.add_argument(
        "--shared-tokens", type=int, default=0, help="first tokens that all prompts share"
    )
    serve.add_argument(
        "--speed", type=_above_zero, default=1.0, help="replay --trace so much faster"
    )
    serve.add_argument(
        "--prompt-tokens", type=int, default=16384, help="of the long prompts of --scenario mixed"
    )
    serve.add_argument("--warm-ups", type=int, default=1, help="requests, or runs, not counted")
    serve.add_argument("--repeats", type=_at_least_one, default=3, help="of each load; default 3")
    serve.add_argument("--ttft", type=_above_zero, metavar="SECONDS", help="objective: first token")
    serve.add_argument(
        "--tpot", type=_above_zero, metavar="SECONDS", help="objective: further tokens"
    )
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--openai", metavar="URL", help="an OpenAI endpoint, such as .../v1")
    serve.add_argument("--model-name", help="the model that --openai asks for")
    serve.add_argument(
        "--context-tokens", type=int, default=8192, help="context of the model behind --openai"
    )
    _add_outputs(serve)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("--plot", metavar="FILE", help="write a picture, PNG or SVG")
