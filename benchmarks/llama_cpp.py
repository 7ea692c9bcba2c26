"""Is the default model as fast here as in llama.cpp, on the same GGUF and threads, in the same run?

Needs a virtual environment with the package xllamacpp:
`python benchmarks/llama_cpp.py --peer VENV/bin/python [--threads N] [--json FILE]`.
Runs take turns; medians of tokens per second, and the ratio ours / theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROMPT_TOKENS = 512
NEW_TOKENS = 96
ROUNDS = 5


def run_peer(gguf: str, threads: int) -> None:
    """Child in the peer's environment: prints prompt and decode tokens/s."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.warmup = True
    server = xllamacpp.Server(params)
    request = {
        "prompt": [(7 * i + 3) % 40000 for i in range(PROMPT_TOKENS)],
        "n_predict": NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    timings = server.handle_completions(request)["timings"]
    timings = server.handle_completions(request)["timings"]
    print(json.dumps([timings["prompt_per_second"], timings["predicted_per_second"]]))


def peer(python: str, gguf: Path, threads: int) -> tuple[float, float]:
    """llama.cpp's prompt and decode tokens/s."""
    command = [python, __file__, "--peer-child", str(gguf), "--threads", str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    prompt, decode = json.loads(result.stdout.splitlines()[-1])
    return float(prompt), float(decode)


def ours(folder: Path, threads: int) -> tuple[float, float]:
    """Our prompt and decode tokens/s, at the same lengths."""
    from headwater.bench.model import bench_model

    prompt = bench_model(folder, "prefill", PROMPT_TOKENS, threads)
    decode = bench_model(folder, "decode", 1, threads, context=PROMPT_TOKENS + NEW_TOKENS // 2)
    return float(prompt["tokens_per_s"]), float(decode["tokens_per_s"])


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--peer")
parser.add_argument("--peer-child", help=argparse.SUPPRESS)
parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/headwater"))
parser.add_argument("--format", choices=("bf16", "fp8"), default="bf16")
parser.add_argument("--json")
arguments = parser.parse_args()
if arguments.peer_child:
    run_peer(arguments.peer_child, arguments.threads)
    sys.exit()

from record import write_result  # noqa: E402

from headwater.convert.default_model import ensure_default_model, find_default_gguf  # noqa: E402

model = ensure_default_model(arguments.cache_dir.expanduser(), arguments.format)
rows = []
for _ in range(ROUNDS):
    theirs = peer(arguments.peer, find_default_gguf(), arguments.threads)
    mine = ours(model, arguments.threads)
    rows.append({"theirs": theirs, "ours": mine})
    print(
        f"prefill {mine[0]:.0f} / {theirs[0]:.0f}, decode {mine[1]:.1f} / {theirs[1]:.1f}",
        flush=True,
    )
ratios = {
    what: statistics.median(row["ours"][i] / row["theirs"][i] for row in rows)
    for i, what in enumerate(("prefill", "decode"))
}
print(f"ratio: prefill {ratios['prefill']:.2f}, decode {ratios['decode']:.2f}")
write_result(arguments.json, {"threads": arguments.threads, "ratios": ratios, "runs": rows})
