"""Ranks that compute prompts together against one GPU alone, in one process and as whole stacks.

`python -m tests.gpu.check_ranks DEVICES [--json FILE]`, with DEVICES such as `cuda:0,cuda:1` (over
NCCL), `cuda:0,cuda:0` (one GPU that hosts two ranks in turn, over gloo) or `cpu,cpu`, to try it.
Stacks answer 12 prompts with the first device, then with all; then a rank is killed in a prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from headwater.client import Client
from headwater.config import TelemetryConfig
from headwater.convert.linear_formats import LinearTarget
from headwater.generation import SamplingParams
from headwater.gpu.device import find_device
from headwater.gpu.prefill_session import PrefillSession
from headwater.gpu.team import RankSettings
from headwater.gpu.team_model import TeamModel
from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.model.spec import ModelSpec
from headwater.rpc.channel import open_blocking_channel
from headwater.services.prefill.job import PrefillDone
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import ARCHITECTURES, make_config
from headwater.v1 import prefill_service_pb2 as pb
from headwater.v1 import prefill_service_pb2_grpc
from tests.gpu.up_stack import up_stack
from tests.unit.test_prefill_engine import GatedModel, Rig

_PROMPTS = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((90, 5, 233, 1, 61, 120))]
_VRAM_GIB = 8.0
_PORT = 50750
_TEXT = "The harbour lay still in the morning, and a boy counted the boats as they came in. "
_Row = dict[str, Any]


def check_model(folder: Path, devices: tuple[str, ...]) -> _Row:
    """Keys, values and last hidden states of packed prompts: ranks, one GPU and the CPU."""
    prefix = f"hwranks-{os.getpid()}"
    rig = Rig(folder, prefix)
    spec = ModelSpec.load(folder)
    rig.engine.start()
    found = {}
    try:
        native = NativeTransformer(spec, rig.store, WorkerPool(2), mode=Mode.PREFILL)
        found["cpu"] = _entries(rig, native)
        gpu = find_device(devices[0], _VRAM_GIB)
        session = PrefillSession(spec, rig.store, gpu, wanted_tokens=512)
        found["one"] = _entries(rig, session.model)
        settings = RankSettings(devices, rig.store.handle, _VRAM_GIB, 512, 0, 2, TelemetryConfig())
        way = len(devices)
        team = TeamModel(spec, settings, lambda: way, lambda _: None)
        try:
            team.start()
            team.use_pool(rig.writer)
            found["ranks"] = _entries(rig, team)
            way = 1
            found["first rank alone"] = _entries(rig, team)
        finally:
            team.close()
        session.close()
    finally:
        rig.close()
    row: _Row = {"what": f"{folder.name} on {', '.join(devices)}"}
    pairs = ("one", "cpu"), ("ranks", "cpu"), ("ranks", "one"), ("first rank alone", "one")
    for name, other in pairs:
        errors = torch.stack(
            [_row_errors(a, b) for a, b in zip(found[name][:-1], found[other][:-1], strict=True)]
        )
        # A near tie that a gate decides otherwise changes a token, and those after it a little.
        row[f"{name} against {other}, nine of ten entries below"] = float(errors.quantile(0.9))
        hidden = _row_errors(found[name][-1], found[other][-1])
        row[f"{name} against {other}, hidden states, median"] = float(hidden.median())
    return row


def _row_errors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.float(), b.float()
    errors: torch.Tensor = (a - b).norm(dim=1) / b.norm(dim=1)
    return errors


def _entries(rig: Rig, model: Any) -> list[torch.Tensor]:
    """All prompts' entries of each layer, and their hidden states last."""
    rig.model = GatedModel(model)
    rig.engine.ways.offer({1: 512})
    requests = [rig.ask(prompt) for prompt in _PROMPTS]
    for request in requests:
        ended = request.end()
        assert isinstance(ended, PrefillDone), ended
    memory, layers = rig.writer.memory, []
    for layer in memory.pages.layers:
        parts = []
        for request in requests:
            blocks, count = list(request.lease.block_ids), len(request.job.token_ids)
            entries = layer[blocks]
            entries = entries if entries.dim() == 3 else entries.transpose(1, 2)
            parts.append(entries.flatten(0, 1)[:count].flatten(1).clone())
        layers.append(torch.cat(parts))
    slots = [request.lease.slot for request in requests]
    found = [*layers, memory.hidden[slots].clone()]
    rig.pool.release(1, [request.lease.lease_id for request in requests])
    return found


def check_stacks(folder: Path, devices: tuple[str, ...], vram_gib: float) -> list[_Row]:
    """Answers with the first device and with all; a rank killed; decode at work beside prompts."""
    checks = _answers, _lose_a_rank, _beside_decode
    with tempfile.TemporaryDirectory() as place:
        one = _with_stack(folder, devices[:1], vram_gib, Path(place), _answers)
        rows = _with_stack(folder, devices, vram_gib, Path(place), *checks)
    same = sum(a == b for a, b in zip(one[0]["answers"], rows[0]["answers"], strict=True))
    compared = {
        "what": "answers of all devices against those of the first",
        "prompts": len(one[0]["answers"]),
        "same": same,
        "one_s": one[0]["seconds"],
        "all_s": rows[0]["seconds"],
        "ways": rows[0]["ways"],
    }
    return [compared, *rows[1:]]


def _with_stack(
    folder: Path, devices: tuple[str, ...], vram_gib: float, place: Path, *checks: Any
) -> list[_Row]:
    settings = {
        "model.path": str(folder),
        "gpu.prefill": "on",
        "gpu.vram_gib": str(vram_gib),
        "gpu.prefill_devices": ", ".join(devices),
        "gpu.decode": "off" if devices[0] == "cpu" else "on",
    }
    prefix = f"hwstack-{len(devices)}"
    log = place / "run" / prefix / "prefill.log"
    try:
        with up_stack(prefix, _PORT, place, settings, 200):
            return [check() for check in checks]
    except BaseException:
        print(log.read_text() if log.exists() else "no log", flush=True)
        raise


def _status() -> pb.GetPrefillStatusResponse:
    with open_blocking_channel(f"127.0.0.1:{_PORT + 1}") as channel:
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        status: pb.GetPrefillStatusResponse = stub.GetStatus(pb.GetPrefillStatusRequest())
        return status


async def _ask(number: int, max_tokens: int = 32) -> tuple[list[int], float]:
    """Tokens of one answer, and seconds to the first."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens: list[int] = []
    began_at, first = time.monotonic(), 0.0
    async with Client(f"127.0.0.1:{_PORT}") as client:
        async for event in client.generate(f"{number}. " + _TEXT * (1 + number % 6), params):
            first = first or time.monotonic() - began_at
            tokens += [token.id for token in event.tokens]
    return tokens, first


def _answers() -> _Row:
    async def ask_all() -> list[list[int]]:
        alone = [(await _ask(number))[0] for number in range(6)]
        rest = await asyncio.gather(*(_ask(number) for number in range(6, 12)))
        return alone + [tokens for tokens, _ in rest]

    began_at = time.monotonic()
    answers = asyncio.run(ask_all())
    seconds = time.monotonic() - began_at
    return {"answers": answers, "seconds": seconds, "ways": _ways()}


def _ways() -> dict[int, str]:
    return {
        way.gpus: f"{way.passes} passes, {1e3 * way.costs.seconds_per_pass:.1f} ms and "
        f"{1e3 * way.costs.seconds_per_token:.3f} ms per token"
        for way in _status().ways
    }


def _lose_a_rank() -> _Row:
    """The first rank, without which no sweep goes on, is stopped within a prompt and killed."""
    expected, _ = asyncio.run(_ask(77))
    rank = min(_children(_status().pid))
    os.kill(rank, signal.SIGSTOP)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(asyncio.run(_ask(78))))
    asking.start()
    while _status().running_requests == 0:
        time.sleep(0.01)
    began_at = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    asking.join(120)
    took = time.monotonic() - began_at
    again, _ = asyncio.run(_ask(77))
    status = _status()
    return {
        "what": "a rank killed within a prompt",
        "answered": len(found) == 1 and len(found[0][0]) == len(expected),
        "answered_after_s": took,
        "lost_ranks": status.lost_ranks,
        "ranks_now": len(_children(status.pid)),
        "same_answer_as_before": again == expected,
    }


def _beside_decode() -> _Row:
    """On how many GPUs prompts are computed while an answer is under way, and after it."""
    long = threading.Thread(target=lambda: asyncio.run(_ask(90, max_tokens=1500)))
    long.start()
    time.sleep(0.6)
    before = {way.gpus: way.passes for way in _status().ways}
    asyncio.run(_ask(91, max_tokens=4))
    during = _status().gpus
    after = {way.gpus: way.passes for way in _status().ways}
    is_running = long.is_alive()
    long.join(120)
    time.sleep(3.0)
    return {
        "what": "a prompt beside an answer",
        "answer_was_under_way": is_running,
        "gpus_during": during,
        "passes": {way: after[way] - before[way] for way in after},
        "gpus_after": _status().gpus,
    }


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def main() -> None:
    """Prints a row per check, and writes them as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices")
    parser.add_argument("--json")
    parser.add_argument("--architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--stack", default="tiny", help="shape of the stacks' model, or none")
    parser.add_argument("--stack-layers", type=int, default=6)
    parser.add_argument("--stack-vram", type=float, default=8.0, help="GiB; with less, it streams")
    arguments = parser.parse_args()
    devices = tuple(name.strip() for name in arguments.devices.split(","))
    rows: list[_Row] = []

    def show(row: _Row) -> None:
        rows.append(row)
        print(row, flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps({"figures": rows}, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as made, torch.inference_mode():
        for architecture in arguments.architectures:
            folder = Path(made) / architecture
            write_synthetic(
                folder, make_config("tiny", architecture, layers=6), LinearTarget("fp8")
            )
            show(check_model(folder, devices))
        if arguments.stack != "none":
            folder = Path(made) / "stack"
            architecture = "deepseek_v3" if arguments.stack == "tiny" else None
            config = make_config(arguments.stack, architecture, layers=arguments.stack_layers)
            write_synthetic(folder, config, LinearTarget("fp8"))
            for row in check_stacks(folder, devices, arguments.stack_vram):
                show(row)


if __name__ == "__main__":
    main()
