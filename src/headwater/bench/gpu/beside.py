"""Decode steps while prompts stream through the same GPU: what a running answer loses.

Owns the three situations: steps alone; beside copies at the link's full rate and nothing else,
which tells what host memory and link cost; beside whole sweeps, which adds the GPU's own time. The
prefill is a process of its own, as in service.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.gpu.hybrid import Shape, workers
from headwater.bench.gpu.link import link_gb_per_s
from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import batch_of, experts_of, pages_for
from headwater.gpu.device import find_gpu
from headwater.gpu.dual_batch import micro_batches
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.prefill_session import PrefillSession
from headwater.kernels import self_test

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

# CPUs that the experts leave to the decoding thread and to prefill.
_SPARE_CPUS = 2
_STEPS_ALONE = 15


def bench_beside(
    shape: Shape, batch: int, context: int, tokens: int, vram_gib: float
) -> Iterator[dict[str, Any]]:
    """A row per situation; `tokens` in each sweep, through at most `vram_gib` of the device."""
    self_test()
    spec, gpu = shape.spec(), find_gpu(0)
    with _prefill(shape, tokens, vram_gib) as prefill, workers(_SPARE_CPUS) as pool:
        decoder = HybridDecoder(
            spec,
            RandomModel(spec, shape.distinct),
            pool,
            gpu.device,
            max_rows=batch,
            max_context=context,
        )
        assert prefill.recv() == "ready"
        with torch.inference_mode():
            timed_steps(decoder, batch, context, lambda count: count < 4)
            alone = timed_steps(decoder, batch, context, lambda count: count < _STEPS_ALONE)
            prefill.send("sweep")
            sweep_alone: float = prefill.recv()
            yield row_of("alone", batch, alone, alone) | {"sweep_s": sweep_alone, "tokens": tokens}
            for work in ("copies", "sweep"):
                prefill.send(work)
                beside = timed_steps(decoder, batch, context, lambda _: not prefill.poll())
                seconds: float = prefill.recv()
                yield row_of(work, batch, beside, alone) | {"work_s": seconds}
        prefill.send("end")


def timed_steps(decoder: HybridDecoder, batch: int, context: int, goes_on: Any) -> list[float]:
    """Seconds of each step, as long as `goes_on(steps so far)`."""
    parts, positions = micro_batches(batch, is_dual=False), torch.full((batch,), context - 1)
    generator = torch.Generator().manual_seed(batch)
    times: list[float] = []
    while goes_on(len(times)):
        tokens = torch.randint(decoder.spec.vocab_size, (batch,), generator=generator)
        began_at = time.perf_counter()
        decoder.logits(decoder.step(parts, tokens, positions)[0])
        times.append(time.perf_counter() - began_at)
    return times


def row_of(what: str, batch: int, times: Sequence[float], alone: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "what": f"decode beside {what}" if what != "alone" else "decode alone",
        "batch": batch,
        "steps": len(times),
        "tpot_ms": 1e3 * statistics.median(times),
        "tpot_p95_ms": 1e3 * ordered[int(0.95 * (len(ordered) - 1))],
        "over_alone": statistics.median(times) / statistics.median(alone),
    }


@contextmanager
def _prefill(shape: Shape, tokens: int, vram_gib: float) -> Iterator[Connection]:
    """A process that sweeps or copies when told to, and says how long it took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_prefill, args=(theirs, shape, tokens, vram_gib))
    process.start()
    try:
        yield ours
        process.join(60)
    finally:
        process.kill()
        process.join()


def _serve_prefill(connection: Connection, shape: Shape, tokens: int, vram_gib: float) -> None:
    torch.set_num_threads(1)
    spec, gpu = shape.spec(), find_gpu(0, vram_gib)
    weights = RandomModel(spec, shape.distinct)
    # The CPUs that no worker of the pool sits on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-_SPARE_CPUS:])
    session = PrefillSession(spec, weights, gpu, wanted_tokens=tokens)
    session.ranges.wait(session.ranges.num_ranges - 1)
    batch, pages = batch_of(spec, tokens), pages_for(spec, tokens)
    source = [experts_of(spec, weights)]
    sweep_bytes = sum(item.num_bytes for item in session.layout.items)
    with torch.inference_mode():
        session.model.forward(batch, pages)
        connection.send("ready")
        while (work := connection.recv()) != "end":
            began_at = time.monotonic()
            if work == "sweep":
                session.model.forward(batch, pages)
            else:
                rounds = sweep_bytes // source[0].numel()
                link_gb_per_s(source, gpu.device, rounds=min(rounds, 58))
            torch.cuda.synchronize()
            connection.send(time.monotonic() - began_at)
    session.close()
