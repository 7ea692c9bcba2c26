"""The routed experts of one layer: bytes of weights read per second, against reading memory."""

from __future__ import annotations

from typing import Any

import torch

from headwater.bench.timing import READ_BYTES, ReadProbe, alternate, worker_pool
from headwater.bench.weights import Format, random_matrix
from headwater.kernels import Mode, MoeLayer, WorkerPool, isa
from headwater.synth.shapes import make_config

# Experts that are not resident would only cost memory: a token's are drawn from these.
RESIDENT_EXPERTS = 16


def bench_moe(
    shape: str, fmt: Format, batch: int, threads: int, *, experts: int = RESIDENT_EXPERTS
) -> dict[str, Any]:
    """One row of figures; the experts of each token are drawn anew for each run."""
    with worker_pool(threads) as pool:
        return _measure(pool, shape, fmt, batch, experts)


def _measure(pool: WorkerPool, shape: str, fmt: Format, batch: int, experts: int) -> dict[str, Any]:
    config = make_config(shape)
    hidden = int(config["hidden_size"])
    intermediate = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    top_k = int(config["num_experts_per_tok"])
    layer = MoeLayer(
        pool,
        random_matrix((experts, 2), intermediate, hidden, fmt),
        random_matrix((experts,), hidden, intermediate, fmt),
        experts_per_token=top_k,
    )
    x, out = torch.randn(batch, hidden), torch.empty(batch, hidden)
    weights = torch.full((batch, top_k), 1 / top_k)
    generator = torch.Generator().manual_seed(0)
    draws = [_draw(batch, experts, top_k, generator) for _ in range(16)]
    mode = Mode.DECODE if batch <= 64 else Mode.PREFILL
    turns = iter(range(1 << 30))

    def run() -> None:
        layer(x, draws[next(turns) % len(draws)], weights, out, mode)

    distinct = sum(draw.unique().numel() for draw in draws) / len(draws)
    num_bytes = distinct * layer.expert_bytes
    timed = alternate(
        run, ReadProbe(pool), rounds=11, at_once=max(1, round(READ_BYTES / num_bytes))
    )
    gb_per_s = num_bytes / timed.seconds / 1e9
    flops = 2.0 * batch * top_k * 3 * hidden * intermediate
    return {
        "what": "moe",
        "shape": shape,
        "format": fmt,
        "batch": batch,
        "threads": pool.num_threads,
        "isa": isa(),
        "us": timed.seconds * 1e6,
        "gb_per_s": gb_per_s,
        "read_gb_per_s": timed.read_gb_per_s,
        "ratio": gb_per_s / timed.read_gb_per_s,
        "tflop_per_s": flops / timed.seconds / 1e12,
        "tokens_per_s": batch / timed.seconds,
    }


def _draw(batch: int, experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for each token, INT32 [batch, top_k]."""
    scores = torch.rand(batch, experts, generator=generator)
    return scores.topk(top_k, dim=-1).indices.to(torch.int32)
