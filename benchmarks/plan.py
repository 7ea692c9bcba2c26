"""How far off is `headwater plan`? Every measurement in results/ that it speaks of, against it.

`python benchmarks/plan.py [--json FILE]`. Rates of links and memory are those that each run
measured of itself, the rest is the machine's file: what is held against the measurement is the
arithmetic.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import write_result

from headwater.cli.plan import spec_of
from headwater.cli.table import print_table
from headwater.model.spec import ModelSpec
from headwater.plan.footprint import Footprint, footprint_of
from headwater.plan.machine import Machine, read_machine
from headwater.plan.predict import prompt_time, step_time
from headwater.synth.shapes import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
MACHINES = ROOT.parent / "examples" / "machines"


def _figures(name: str) -> Any:
    """Rows, or one table, of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def _with_link(machine: Machine, gb_per_s: float) -> Machine:
    gpus = tuple(dataclasses.replace(gpu, link_gb_per_s=gb_per_s) for gpu in machine.gpus)
    return dataclasses.replace(machine, gpus=gpus)


def _with_read(machine: Machine, gb_per_s: float) -> Machine:
    return dataclasses.replace(machine, dram_gb_per_s=(gb_per_s,))


def comparisons() -> Iterator[tuple[str, float, float]]:
    """What, as measured, as predicted; in seconds."""
    h200 = read_machine(MACHINES / "h200.toml")
    zen4 = read_machine(MACHINES / "zen4-2-cores.toml")
    deepseek = footprint_of(spec_of("deepseek-v3", None))
    for row in _figures("slp"):
        if row["what"] != "slp":
            continue
        machine = _with_link(h200, row["link_gb_per_s"])
        found = prompt_time(deepseek, machine, row["tokens"])
        name = f"slp {row['tokens']} tokens"
        yield name, row["ttft_s"], found.seconds
        yield f"{name}, computing alone", row["compute_floor_s"], found.compute_seconds
    for row in _figures("dslp"):
        if row["what"] == "dslp" and row["rank"] == 0:
            machine = _with_link(h200, row["link_alone_gb_per_s"])
            found = prompt_time(deepseek, machine, row["tokens"], num_gpus=2)
            yield f"dslp {row['tokens']} tokens", row["ttft_s"], found.seconds
    for row in _figures("hybrid"):
        if row["what"] == "hybrid":
            machine = _with_read(h200, row["read_gb_per_s"])
            step = step_time(deepseek, machine, row["batch"], row["context"])
            name = f"hybrid batch {row['batch']}"
            yield name, row["step_ms"] / 1e3, step.seconds
            yield f"{name}, CPU's part", row["cpu_ms"] / 1e3, step.cpu_seconds
    yield from _on_the_cpu(zen4)


def _on_the_cpu(zen4: Machine) -> Iterator[tuple[str, float, float]]:
    (row,) = _figures("decode_deepseek_v3")
    six = _cut("deepseek-v3", 6)
    step = step_time(six, _with_read(zen4, row["read_gb_per_s"]), row["batch"], 0, num_gpus=0)
    yield "decode on 2 cores, 6 layers", row["us"] / 1e6, step.seconds
    packing = _figures("prefill_packing")
    sizes, median = packing["sizes"], packing["median"]
    two = footprint_of(ModelSpec.from_config(make_config("qwen3-30b", layers=2), "config.json"))
    found = prompt_time(two, zen4, sizes["long_tokens"], num_gpus=0)
    yield "prefill on 2 cores, 2 layers", median["long_alone_seconds"], found.seconds


def _cut(shape: str, layers: int) -> Footprint:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = make_config(shape, layers=layers) | {"quantization_config": fp8}
    return footprint_of(ModelSpec.from_config(config, "config.json"))


def main() -> None:
    """Prints the table and the median error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = [
        {"what": what, "measured_s": measured, "predicted_s": predicted}
        | {"error": predicted / measured - 1}
        for what, measured, predicted in comparisons()
    ]
    print_table(
        ("what", "measured", "predicted", "error"),
        [
            (
                r["what"],
                f"{r['measured_s']:.3g} s",
                f"{r['predicted_s']:.3g} s",
                f"{r['error']:+.1%}",
            )
            for r in rows
        ],
    )
    errors = [abs(row["error"]) for row in rows]
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    write_result(arguments.json, rows)


if __name__ == "__main__":
    main()
