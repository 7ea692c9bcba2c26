"""Distributed stream-loading prefill over the GPUs of one machine, against one of them alone.

One process per GPU, forked before CUDA starts, so that all map the same weights. Rank 0 first
measures a single GPU, then all ranks compute the same prompts together. `ttft_s` is of a sweep that
comes after a pause, so that its first weights are there; `steady_s` of one that follows directly.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.gpu.link import link_gb_per_s
from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import batch_of, experts_of, pages_for, published_spec
from headwater.bench.gpu.timeline import TimedQueues
from headwater.errors import ConfigError, UnavailableError
from headwater.gpu.device import find_gpu
from headwater.gpu.exchange import Exchange
from headwater.gpu.peers import Peers
from headwater.gpu.portion import portion_of
from headwater.gpu.precision import ROUNDED
from headwater.gpu.prefill_session import PrefillSession
from headwater.model.layer_spec import MoeFfnSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from headwater.kv.pages import KvPages
    from headwater.model.spec import ModelSpec

# Before each measured sweep: as many layers as fill rings and warm what has to be warmed.
_WARM_LAYERS = 5
# Longer prompts, bound by computation, are swept only once.
_MOST_STEADY_TOKENS = 1 << 14
_TIMES = ("ttft_s", "steady_s")


@dataclass(frozen=True, slots=True)
class _Task:
    """What every rank is told."""

    spec: ModelSpec
    weights: RandomModel
    pages: KvPages
    single: Sequence[int]
    together: Sequence[int]
    ranks: int
    vram_gib: float
    quantize_from: int
    meeting: Path
    rows: Any


def bench_dslp(
    shape: str,
    single: Sequence[int],
    together: Sequence[int],
    *,
    ranks: int,
    distinct: int,
    vram_gib: float,
    quantize_from: int,
) -> Iterator[dict[str, Any]]:
    """Rows of one GPU at `single` prompt lengths, then of `ranks` of them at `together`.

    Raises ConfigError when this process sees fewer GPUs, UnavailableError when a rank fails.
    """
    _check_gpus(ranks)
    spec = published_spec(shape)
    began_at = time.monotonic()
    weights = RandomModel(spec, distinct)
    yield {
        "what": "weights",
        "distinct_layers": distinct,
        "gb": weights.num_bytes / 1e9,
        "seconds": time.monotonic() - began_at,
    }
    context = multiprocessing.get_context("fork")
    rows: Any = context.Queue()
    pages = pages_for(spec, max(*single, *together))
    for layer in pages.layers:
        layer.share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        task = _Task(
            spec, weights, pages, single, together, ranks, vram_gib, quantize_from, meeting, rows
        )
        processes = [context.Process(target=_rank, args=(rank, task)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            while any(process.is_alive() for process in processes) or not rows.empty():
                try:
                    yield rows.get(timeout=1.0)
                except queue.Empty:
                    if _dead(processes):
                        break
            if dead := _dead(processes):
                raise UnavailableError(
                    f"gpu: rank {dead[0]} of {ranks} ended before its figures were there; what it "
                    "printed says why"
                )
        finally:
            for process in processes:
                process.kill()


def _dead(processes: Sequence[Any]) -> list[int]:
    """The numbers of those that failed."""
    return [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]


def _check_gpus(ranks: int) -> None:
    # In a process of its own: this one is forked, which must happen before CUDA starts.
    program = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    if int(asked.stdout) < ranks:
        raise ConfigError(
            f"--ranks: {ranks} CUDA devices are needed, this process sees {int(asked.stdout)}; "
            "name fewer, or give it more"
        )


def _rank(rank: int, task: _Task) -> None:
    # A forked process must not use the OpenMP threads that its parent had.
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    gpu = find_gpu(rank, task.vram_gib)
    if task.vram_gib:
        total = torch.cuda.get_device_properties(gpu.device).total_memory
        torch.cuda.set_per_process_memory_fraction(task.vram_gib * 2**30 / total, gpu.device)
    sources = [experts_of(task.spec, task.weights)]
    with torch.inference_mode():
        seconds = _alone(gpu, sources, task) if rank == 0 else {}
        peers = Peers.meet(task.meeting, rank, task.ranks, "nccl")
        exchange = Exchange(peers)
        session = _session(find_gpu(rank, task.vram_gib), task, exchange)
        links = []
        for turn in range(task.ranks):
            peers.barrier()
            if turn == rank:
                links.append(link_gb_per_s(sources, gpu.device))
        peers.barrier()
        links.append(link_gb_per_s(sources, gpu.device, rounds=6))
        for length in task.together:
            row = _sweep_row(session, task, length, peers.barrier)
            joint = links[-1]
            row |= {"what": "dslp", "rank": rank, "ranks": task.ranks}
            row |= {"link_alone_gb_per_s": links[0], "link_together_gb_per_s": joint}
            row |= {"h2d_ratio": row["moved_gb_per_s"] / joint}
            if length in seconds:
                gains = [a / row[b] for a, b in zip(seconds[length], _TIMES, strict=True)]
                row |= {"speedup": gains[0], "steady_speedup": gains[1]}
            row |= _exchange_times(exchange, session, task.spec, length, row["ttft_s"])
            task.rows.put(row)
        peers.barrier()
        session.close()
    task.rows.close()
    task.rows.join_thread()
    os._exit(0)


def _session(gpu: Any, task: _Task, exchange: Exchange | None) -> PrefillSession:
    session = PrefillSession(
        task.spec,
        task.weights,
        gpu,
        wanted_tokens=max(*task.single, *task.together),
        quantize_from=task.quantize_from,
        exchange=exchange,
    )
    session.ranges.wait(session.ranges.num_ranges - 1)
    session.model.streamer.queues = TimedQueues(session.model.streamer.queues)
    return session


def _alone(gpu: Any, sources: Sequence[Tensor], task: _Task) -> dict[int, list[float]]:
    """Rows of this GPU by itself; seconds by length of prompt."""
    session = _session(gpu, task, None)
    seconds = {}
    for length in task.single:
        link = link_gb_per_s(sources, gpu.device)
        row = _sweep_row(session, task, length, torch.cuda.synchronize)
        row |= {"what": "slp", "link_gb_per_s": link, "h2d_ratio": row["moved_gb_per_s"] / link}
        seconds[length] = [row[name] for name in _TIMES]
        task.rows.put(row)
    session.close()
    return seconds


def _sweep_row(
    session: PrefillSession, task: _Task, length: int, barrier: Callable[[], None]
) -> dict[str, Any]:
    spec, model = task.spec, session.model
    queues: Any = model.streamer.queues
    batch = batch_of(spec, length)
    torch.cuda.reset_peak_memory_stats(model.device)
    # The end of a sweep, after which copies run ahead into the next one.
    hidden = model.embed(batch.token_ids)
    for layer in (*range(_WARM_LAYERS), spec.num_layers - 1):
        hidden = model.forward_layer(layer, hidden, batch, task.pages)
    barrier()
    queues.begin()
    began_at, ends = time.perf_counter(), []
    for _ in range(2 if length <= _MOST_STEADY_TOKENS else 1):
        # Ends when the last layer's states are there; copies for the next sweep go on.
        hidden = model.forward(batch, task.pages)
        ends.append(time.perf_counter() - began_at)
    account = queues.account(ends[-1])
    assert bool(torch.isfinite(hidden).all()), "the sweep gave no numbers"
    return {
        "tokens": length,
        "ttft_s": ends[0],
        "steady_s": ends[-1] - ends[0] if len(ends) > 1 else ends[0],
        "tokens_per_s": length / ends[0],
        **account,
        "expert_slots": session.plan.expert_slots,
        "dense_slots": session.plan.dense_slots,
        "peak_gib": torch.cuda.max_memory_reserved(model.device) / 2**30,
    }


def _exchange_times(
    exchange: Exchange, session: PrefillSession, spec: ModelSpec, length: int, taken: float
) -> dict[str, float]:
    """What a routed layer's communication takes by itself: everybody's rows, partial sums back.

    The first of them travels while the shared experts compute, so that the share is an upper bound.
    """
    portion = portion_of(batch_of(spec, length), exchange.rank, exchange.world_size)
    device = session.model.device
    mine = torch.zeros(len(portion.positions), spec.hidden_size, dtype=ROUNDED, device=device)
    partial = torch.zeros(length, spec.hidden_size, device=device)
    best = [float("inf")] * 2
    before = exchange.sent_bytes
    for _ in range(4):
        for index in (0, 1):
            torch.cuda.synchronize(device)
            began_at = time.perf_counter()
            if index == 0:
                exchange.gather(mine, portion)
            else:
                exchange.reduce(partial, portion)
            torch.cuda.synchronize(device)
            best[index] = min(best[index], time.perf_counter() - began_at)
    num_routed = sum(isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers)
    return {
        "sent_gb_per_layer": (exchange.sent_bytes - before) / 4e9,
        "gather_s_per_layer": best[0],
        "reduce_s_per_layer": best[1],
        "exchange_share": sum(best) * num_routed / taken,
    }
