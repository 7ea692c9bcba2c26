"""Greedy answers of a whole stack on a GPU against those of a whole stack on the CPU.

`python -m tests.gpu.check_services [--device off] [--exact] [--json FILE] [FOLDER ...]`: for each
folder, and for the default model if none is named, `headwater up` twice: once with gpu.prefill and
gpu.decode off, once with both on; with `--exact`, both with model.exact_activations. 20 prompts go
through the router, some alone, some at once. Where answers part, the difference of the
log-probabilities there is shown. Without FOLDER, a synthetic model of DeepSeek-V3's architecture
follows. `--device off` runs both on the CPU, to try the check itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from headwater.client import Client
from headwater.convert.linear_formats import LinearTarget
from headwater.generation import SamplingParams, Token
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import make_config
from tests.gpu.up_stack import up_stack

PROMPTS, ANSWER_TOKENS = 20, 48
_PORT = 50650
_TEXT = (
    "The harbour lay still in the morning. Fishermen mended their nets along the quay, and a boy "
    "counted the boats as they came in, one after the other, until the bell rang for school. "
)
_QUESTIONS = (
    "The capital of France is",
    "Once upon a time there was a miller who",
    "Water boils when",
    "def fibonacci(n):",
    "The three largest planets are",
)


@dataclass(frozen=True)
class Answer:
    """Tokens with their alternatives, and seconds per token after the first."""

    tokens: list[Token]
    tpot: float


def questions() -> list[str]:
    """From a line to some hundreds of tokens, no two alike."""
    return [
        f"Chapter {i}. " + _TEXT * (i % 5 * 4) + _QUESTIONS[i // 4 % len(_QUESTIONS)]
        for i in range(PROMPTS)
    ]


async def _ask(client: Client, prompt: str) -> Answer:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, logprobs=20, ignore_eos=True)
    tokens: list[Token] = []
    times: list[float] = []
    async for event in client.generate(prompt, params):
        if event.tokens:
            times.append(time.monotonic())
        tokens += event.tokens
    return Answer(tokens, (times[-1] - times[0]) / (len(tokens) - 1))


async def _ask_all(address: str) -> tuple[list[Answer], list[Answer]]:
    """Every prompt alone, then eight at a time."""
    gate = asyncio.Semaphore(8)

    async def one(prompt: str) -> Answer:
        async with gate:
            return await _ask(client, prompt)

    async with Client(address) as client:
        alone = [await _ask(client, prompt) for prompt in questions()]
        together = await asyncio.gather(*(one(prompt) for prompt in questions()))
    return alone, list(together)


def _serve(
    folder: str, device: str, place: Path, *, is_exact: bool
) -> tuple[list[Answer], list[Answer], list[str]]:
    """Answers of a stack of its own, alone and together, and what its engines said of devices."""
    settings = {"gpu.prefill": device, "gpu.decode": device}
    settings["model.exact_activations"] = str(is_exact).lower()
    if folder:
        settings["model.path"] = folder
    with up_stack(f"hwcheck-{device}", _PORT, place, settings, 300) as logs:
        alone, together = asyncio.run(_ask_all(f"127.0.0.1:{_PORT}"))
        said = [
            line
            for path in sorted(logs.glob("*.log"))
            for line in path.read_text().splitlines()
            if "computed on" in line or "prefill streams" in line or " ERROR " in line
        ]
    return alone, together, said


def _compare(name: str, ours: list[Answer], theirs: list[Answer]) -> dict[str, object]:
    """How many answers are the same, and how far apart the others are where they part."""
    apart: list[float] = []
    gaps: list[float] = []
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        ids = [[token.id for token in answer.tokens] for answer in (a, b)]
        if ids[0] == ids[1]:
            continue
        at = next(i for i, pair in enumerate(zip(*ids, strict=True)) if pair[0] != pair[1])
        ranked = [dict(answer.tokens[at].top_logprobs) for answer in (a, b)]
        chosen = [ids[0][at], ids[1][at]]
        differences = [abs(ranked[0].get(t, -99.0) - ranked[1].get(t, -99.0)) for t in chosen]
        apart.append(max(differences))
        gaps.append(abs(ranked[1].get(chosen[1], -99.0) - ranked[1].get(chosen[0], -99.0)))
        print(
            f"{name}: prompt {number} parts at token {at}, log-probabilities differ by"
            f" {apart[-1]:.4f}; the CPU's two best were {gaps[-1]:.4f} apart",
            flush=True,
        )
    return {
        "what": name,
        "prompts": len(ours),
        "same": len(ours) - len(apart),
        "largest_difference": max(apart, default=0.0),
        "largest_gap": max(gaps, default=0.0),
        "tpot_ms_gpu": 1e3 * statistics.median(a.tpot for a in ours),
        "tpot_ms_cpu": 1e3 * statistics.median(a.tpot for a in theirs),
    }


def main(folders: list[str], device: str, json_path: str | None, *, is_exact: bool) -> None:
    """Prints and, if asked for, writes a row per model and way of asking."""
    rows: list[dict[str, object]] = []
    for folder in folders:
        name = Path(folder).name or "default model"
        if is_exact:
            name += ", exact activations"
        with tempfile.TemporaryDirectory() as place:
            cpu = _serve(folder, "off", Path(place), is_exact=is_exact)
            gpu = _serve(folder, device, Path(place), is_exact=is_exact)
        print("\n".join(gpu[2]))
        for way, ours, theirs in zip(("alone", "together"), gpu[:2], cpu[:2], strict=True):
            rows.append(_compare(f"{name}, {way}", ours, theirs) | {"log": gpu[2]})
            print({k: v for k, v in rows[-1].items() if k != "log"}, flush=True)
        if json_path:
            Path(json_path).write_text(json.dumps({"figures": rows}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--device", choices=("on", "off"), default="on")
    parser.add_argument("--exact", action="store_true", help="both with model.exact_activations")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        wanted = chosen.folders
        if not wanted:
            synthetic = Path(made) / "synthetic-deepseek_v3"
            write_synthetic(
                synthetic, make_config("tiny", "deepseek_v3", layers=6), LinearTarget("fp8")
            )
            wanted = ["", str(synthetic)]
        main(wanted, chosen.device, chosen.json, is_exact=chosen.exact)
