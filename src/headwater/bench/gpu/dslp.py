"""Distributed stream-loading prefill over the GPUs of one machine, against one of them alone.

One process per GPU, forked before CUDA starts, so that all map the same weights. Rank 0 first
measures a single GPU (see slp.py), then all ranks compute the same prompts together.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from headwater.bench.gpu.link import link_gb_per_s
from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import batch_of, experts_of, pages_for, published_spec, sweep_row
from headwater.gpu.device import find_gpu
from headwater.gpu.exchange import Exchange
from headwater.gpu.portion import portion_of
from headwater.gpu.prefill_session import PrefillSession

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headwater.kv.pages import KvPages
    from headwater.model.spec import ModelSpec


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
    """Rows of one GPU at `single` prompt lengths, then of `ranks` of them at `together`."""
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
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    os.environ.update(address)
    processes = [
        context.Process(
            target=_rank,
            args=(
                rank,
                ranks,
                spec,
                weights,
                pages,
                single,
                together,
                vram_gib,
                quantize_from,
                rows,
            ),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes) or not rows.empty():
            try:
                yield rows.get(timeout=1.0)
            except queue.Empty:
                if any(process.exitcode not in (None, 0) for process in processes):
                    raise RuntimeError("a rank died") from None
    finally:
        for process in processes:
            process.kill()


def _rank(
    rank: int,
    ranks: int,
    spec: ModelSpec,
    weights: RandomModel,
    pages: KvPages,
    single: Sequence[int],
    together: Sequence[int],
    vram_gib: float,
    quantize_from: int,
    rows: Any,
) -> None:
    # A forked process must not use the OpenMP threads that its parent had.
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
    gpu = find_gpu(rank, vram_gib)
    if vram_gib:
        total = torch.cuda.get_device_properties(gpu.device).total_memory
        torch.cuda.set_per_process_memory_fraction(vram_gib * 2**30 / total, gpu.device)
    tokens = max(*single, *together)
    sources = [experts_of(spec, weights)]
    seconds: dict[int, float] = {}
    with torch.inference_mode():
        if rank == 0:
            session = PrefillSession(
                spec, weights, gpu, wanted_tokens=tokens, quantize_from=quantize_from
            )
            session.ranges.wait(session.ranges.num_ranges - 1)
            for length in single:
                link = link_gb_per_s(sources, gpu.device)
                row = sweep_row(session, spec, pages, length, link, quantize_from)
                seconds[length] = row["ttft_s"]
                rows.put(row)
            session.close()
            del session
            gc.collect()
            torch.cuda.empty_cache()
        dist.barrier(device_ids=[rank])
        exchange = Exchange()
        session = PrefillSession(
            spec,
            weights,
            gpu,
            wanted_tokens=tokens,
            quantize_from=quantize_from,
            exchange=exchange,
        )
        session.ranges.wait(session.ranges.num_ranges - 1)
        alone = None
        for turn in range(ranks):
            dist.barrier(device_ids=[rank])
            if turn == rank:
                alone = link_gb_per_s(sources, gpu.device)
        dist.barrier(device_ids=[rank])
        both = link_gb_per_s(sources, gpu.device, rounds=6)
        for length in together:
            batch = batch_of(spec, length)
            _sweep(session, spec, batch, pages, layers=5)
            dist.barrier(device_ids=[rank])
            before, sent = session.model.streamer.copied_bytes, exchange.sent_bytes
            began_at = time.monotonic()
            hidden = _sweep(session, spec, batch, pages, layers=spec.num_layers)
            taken = time.monotonic() - began_at
            assert bool(torch.isfinite(hidden).all()), "the sweep gave no numbers"
            copied = session.model.streamer.copied_bytes - before
            rows.put(
                {
                    "what": "dslp",
                    "rank": rank,
                    "ranks": ranks,
                    "tokens": length,
                    "ttft_s": taken,
                    "tokens_per_s": length / taken,
                    "speedup": seconds[length] / taken if length in seconds else None,
                    "link_alone_gb_per_s": alone,
                    "link_together_gb_per_s": both,
                    "h2d_gb_per_s": copied / taken / 1e9,
                    "h2d_ratio": copied / taken / 1e9 / both,
                    "sent_gb": (exchange.sent_bytes - sent) / 1e9,
                    "exchange_s_per_layer": _exchange_seconds(exchange, session, spec, length),
                    "peak_gib": torch.cuda.max_memory_reserved(gpu.device) / 2**30,
                }
            )
        dist.barrier(device_ids=[rank])
        session.close()
    rows.close()
    rows.join_thread()
    dist.destroy_process_group()


def _sweep(
    session: PrefillSession, spec: ModelSpec, batch: Any, pages: KvPages, *, layers: int
) -> torch.Tensor:
    hidden = session.model.embed(batch.token_ids)
    for layer in range(min(layers, spec.num_layers)):
        hidden = session.model.forward_layer(layer, hidden, batch, pages)
    torch.cuda.synchronize()
    return hidden


def _exchange_seconds(
    exchange: Exchange, session: PrefillSession, spec: ModelSpec, length: int
) -> float:
    """What a routed layer's communication takes by itself: rows of all, and partial sums back."""
    portion = portion_of(batch_of(spec, length), exchange.rank, exchange.world_size)
    count = len(portion.positions)
    device = session.model.device
    mine = torch.zeros(count, spec.hidden_size, dtype=torch.bfloat16, device=device)
    partial = torch.zeros(length, spec.hidden_size, device=device)
    found = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        began_at = time.monotonic()
        exchange.gather(mine, portion)
        exchange.reduce(partial, portion)
        torch.cuda.synchronize(device)
        found.append(time.monotonic() - began_at)
    return min(found)
