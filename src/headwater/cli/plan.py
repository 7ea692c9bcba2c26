"""`headwater plan`: what a machine will do with a model, before either is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.table import print_table
from headwater.errors import ConfigError
from headwater.model.spec import ModelSpec
from headwater.plan.machine import read_machine
from headwater.plan.report import make_plan
from headwater.synth.shapes import SHAPES, make_config

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config

# As published; all others are in BF16.
_PUBLISHED_IN_FP8 = ("deepseek-v3", "kimi-k2")


def plan(arguments: argparse.Namespace, config: Config) -> int:  # noqa: ARG001
    """Prints the plan. Raises ConfigError for a machine, CheckpointError for a model."""
    spec = spec_of(arguments.model, arguments.format)
    if arguments.machine == "this":
        from headwater.plan.measure import measure_machine

        machine = measure_machine()
    else:
        machine = read_machine(Path(arguments.machine))
    found = make_plan(spec, machine)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0


def spec_of(model: str, fmt: str | None) -> ModelSpec:
    """A folder, a config.json, or the name of a published shape."""
    path = Path(model)
    if path.is_dir() or path.is_file():
        if fmt is not None:
            raise ConfigError("--format: is for named shapes; a checkpoint says its own")
        if path.is_dir():
            return ModelSpec.load(path)
        return ModelSpec.from_json(path.read_text(encoding="utf-8"), str(path))
    if model not in SHAPES or model == "tiny":
        names = ", ".join(name for name in SHAPES if name != "tiny")
        raise ConfigError(f"--model: {model!r} is no folder and no config.json, nor one of {names}")
    from headwater.convert.linear_formats import LinearTarget
    from headwater.synth.checkpoint import quantization_of

    settings = make_config(model)
    target = LinearTarget(fmt or ("fp8" if model in _PUBLISHED_IN_FP8 else "bf16"))  # type: ignore[arg-type]
    plain = ModelSpec.from_config(settings, model)
    return ModelSpec.from_config(settings | quantization_of(plain, target), model)


def _print(found: dict[str, Any]) -> None:
    machine = found["machine"]
    print(
        f"{machine['name']}: {machine['cores']} cores, {sum(machine['dram_gb_per_s']):.0f} GB/s"
        f" of {machine['dram_gib']:.0f} GiB\n"
    )
    print_table(
        ("memory, GiB", "has", "weights", "KV", "prefill"),
        [
            (
                row["place"],
                *(f"{row[f'{name}_gib']:.1f}" for name in ("has", "weights", "kv", "prefill")),
            )
            for row in found["memory"]
        ],
    )
    for row in found["memory"]:
        if row["problem"]:
            print(f"{row['place']}: {row['problem']}")
    for way in found["ways"]:
        through = f", up to {way['sweep_tokens']} tokens a sweep" if way["gpus"] else ""
        print(f"\n{way['gpus'] or 'no'} GPU{'s' if way['gpus'] != 1 else ''}{through}")
        print_table(
            ("prompt", "first token", "tokens/s", "copies alone", "computing alone"),
            [
                (
                    row["tokens"],
                    f"{row['seconds']:.1f} s",
                    f"{row['tokens_per_s']:.0f}",
                    f"{row['transfer_seconds']:.1f} s",
                    f"{row['compute_seconds']:.1f} s",
                )
                for row in way["prompts"]
            ],
        )
        print_table(
            ("batch", "step", "tokens/s", "CPU", "GPU"),
            [
                (
                    row["batch"],
                    f"{1e3 * row['seconds']:.0f} ms",
                    f"{row['tokens_per_s']:.1f}",
                    f"{1e3 * row['cpu_seconds']:.0f} ms",
                    f"{1e3 * row['gpu_seconds']:.0f} ms",
                )
                for row in way["steps"]
            ],
        )
        print(f"two streams at once: {way['two_streams_per_s']:.1f} tokens/s")
        if way["quantize_from"]:
            print(f"gpu.quantize_from = {way['quantize_from']} would shorten longer prompts")
    print(
        f"\nsteps at {found['context']} tokens of context; a plan is arithmetic, not a measurement"
    )
