"""`headwater`: parses the command line and calls the command.

Each command's module is imported only when it runs, so that `headwater status` does not wait for
torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from headwater.cli.bench_arguments import add_bench_subjects
from headwater.config import load_config
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.config import Config

_FORMATS = ("bf16", "fp8", "int4", "mxfp4")
_GROUP: dict[str, Any] = {
    "type": int,
    "choices": (32, 64, 128),
    "default": 128,
    "help": "columns per scale of int4; default 128",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Expected errors print one line and give 1."""
    arguments = _parser().parse_args(argv)
    try:
        config = load_config(
            config_file=arguments.config, environ=os.environ, assignments=arguments.set
        )
        return _run(arguments, config)
    except HeadwaterError as error:
        print(f"headwater {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace, config: Config) -> int:
    module = importlib.import_module(f"headwater.cli.{arguments.module}")
    status: int = getattr(module, arguments.function)(arguments, config)
    return status


def _parser() -> argparse.ArgumentParser:
    settings = argparse.ArgumentParser(add_help=False)
    settings.add_argument("--config", metavar="FILE", help="TOML file with settings")
    settings.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set one setting; may be repeated",
    )
    parser = argparse.ArgumentParser(prog="headwater", description=__doc__.partition(":")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, module: str, function: str, help_text: str) -> argparse.ArgumentParser:
        child = commands.add_parser(name, parents=[settings], help=help_text, description=help_text)
        child.set_defaults(module=module, function=function)
        return child

    up = command("up", "up", "up", "start prefill, decode, router and the HTTP gateway")
    up.add_argument("--model", help="checkpoint folder; without it the embedded default model")
    up.add_argument("--no-gateway", action="store_true", help="leave the HTTP gateway out")
    up.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="time to become ready"
    )
    down = command("down", "down", "down", "stop what `headwater up` started")
    down.add_argument("--release", action="store_true", help="free the weights in memory as well")

    serve = command("serve", "serve", "serve", "run one process in the foreground")
    serve.add_argument("service", choices=("prefill", "decode", "router", "gateway"))
    health = command("health", "health", "health", "tell whether services are ready; 0 or 1")
    health.add_argument(
        "services",
        nargs="*",
        metavar="SERVICE",
        help="prefill, decode, router, gateway; without any, those that listen here",
    )
    command("model", "model", "model", "make the default model if none is configured; print it")

    status = command("status", "status", "status", "show what every process does")
    status.add_argument("--json", action="store_true", help="print JSON")

    top = command("top", "top", "top", "watch processes, requests, latencies and bandwidths")
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between looks"
    )
    top.add_argument("--once", action="store_true", help="print one look and end")
    doctor = command(
        "doctor",
        "doctor",
        "doctor",
        "examine the machine; exit status 0: all ok, 1: warnings, 2: errors",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    generate = command("generate", "generate", "generate", "continue a text")
    generate.add_argument("prompt", help="the text; - reads it from standard input")
    _add_sampling(generate)
    generate.add_argument("--json", action="store_true", help="print JSON, after the end")
    chat = command("chat", "chat", "chat", "talk with the model in the terminal")
    chat.add_argument("--system", help="system message")
    _add_sampling(chat)

    bench = commands.add_parser("bench", help="measure kernels, models and running stacks")
    add_bench_subjects(bench, settings=settings, formats=_FORMATS)

    shm = command("shm", "shm", "shm", "list or clean shared memory")
    shm.add_argument(
        "action",
        choices=("ls", "reap", "flush"),
        help="ls: segments; reap: remove those that nobody owns; flush: empty the prefix cache",
    )
    shm.add_argument("--release", action="store_true", help="reap: free unused weights as well")
    shm.add_argument("--json", action="store_true", help="print JSON")

    convert = command(
        "convert", "convert", "convert", "turn a GGUF file or a checkpoint into another format"
    )
    convert.add_argument("source", help="GGUF file of the llama architecture, or checkpoint folder")
    convert.add_argument("out", help="folder to write")
    convert.add_argument("--format", choices=_FORMATS, default="bf16")
    convert.add_argument("--group", **_GROUP)
    convert.add_argument(
        "--modules",
        choices=("experts", "all"),
        help="linear weights to convert; default experts for four-bit formats, else all",
    )

    plan = command("plan", "plan", "plan", "predict what a machine will do with a model")
    plan.add_argument(
        "--model", required=True, help="folder, config.json, or deepseek-v3, qwen3-235b, ..."
    )
    plan.add_argument(
        "--machine", default="this", help="TOML file (see examples/machines); default: measure this"
    )
    plan.add_argument("--format", choices=_FORMATS, help="format of a named shape's weights")
    plan.add_argument("--json", action="store_true", help="print JSON")

    synth = command("synth", "synth", "synth", "write a checkpoint of a known shape at random")
    synth.add_argument("--shape", required=True, help="deepseek-v3, kimi-k2, qwen3-235b, ...")
    synth.add_argument("--arch", help="deepseek_v3, qwen3_moe or mixtral; needed for shape tiny")
    synth.add_argument("--layers", type=int, help="cut to so many layers")
    synth.add_argument("--experts", type=int, help="experts per layer")
    synth.add_argument("--format", choices=_FORMATS, default="bf16")
    synth.add_argument("--group", **_GROUP)
    synth.add_argument("--out", required=True, help="folder to write")
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, help="stop after so many tokens")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default 1")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="text that ends the answer; repeatable")


if __name__ == "__main__":
    sys.exit(main())
