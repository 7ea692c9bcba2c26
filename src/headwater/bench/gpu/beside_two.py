"""Decode steps on one GPU while prompts stream through another: what a running answer loses.

Owns the situations: steps alone; beside copies and nothing else, which tells what host memory's
rate explains; beside whole sweeps; and the last two again with copies that leave decode a share of
the time. The CPUs are split, decode's and prefill's, and prefill is a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.gpu.beside import row_of, timed_steps
from headwater.bench.gpu.hybrid import Shape, workers
from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import batch_of, pages_for
from headwater.gpu.device import find_gpu
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.prefill_session import PrefillSession
from headwater.kernels import self_test

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

_STEPS_WARM, _STEPS_ALONE = 40, 15


@dataclass(frozen=True, slots=True)
class Split:
    """Which device decodes and which prefills, and the CPUs that decode's experts leave."""

    decode: int = 1
    prefill: int = 0
    spare_cpus: int = 4


def bench_beside_two(
    shape: Shape,
    batch: int,
    context: int,
    tokens: int,
    vram_gib: float,
    shares: Sequence[float],
    split: Split,
) -> Iterator[dict[str, Any]]:
    """A row per situation; `tokens` in each sweep, copies at each of `shares` of the time."""
    self_test()
    spec, gpu = shape.spec(), find_gpu(split.decode)
    torch.cuda.set_device(gpu.device)
    with (
        _prefill(shape, tokens, vram_gib, split) as prefill,
        workers(split.spare_cpus) as pool,
    ):
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
            timed_steps(decoder, batch, context, lambda count: count < _STEPS_WARM)
            prefill.send(("sweep", 1.0))
            sweep_alone: float = prefill.recv()
            alone = timed_steps(decoder, batch, context, lambda count: count < _STEPS_ALONE)
            yield row_of("alone", batch, alone, alone) | {"sweep_s": sweep_alone, "tokens": tokens}
            for share in shares:
                for work in ("copies", "sweep"):
                    prefill.send((work, share))
                    beside = timed_steps(decoder, batch, context, lambda _: not prefill.poll())
                    seconds: float = prefill.recv()
                    # Steps without it just before and just after: machines drift.
                    after = timed_steps(decoder, batch, context, lambda count: count < _STEPS_ALONE)
                    row = row_of(work, batch, beside, alone + after)
                    alone = after
                    yield row | {"copy_share": share, "work_s": seconds}
        prefill.send(("end", 1.0))


@contextmanager
def _prefill(shape: Shape, tokens: int, vram_gib: float, split: Split) -> Iterator[Connection]:
    """A process that sweeps or copies when told to, and says how long it took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_prefill, args=(theirs, shape, tokens, vram_gib, split))
    process.start()
    try:
        yield ours
        process.join(60)
    finally:
        process.kill()
        process.join()


def _serve_prefill(
    connection: Connection, shape: Shape, tokens: int, vram_gib: float, split: Split
) -> None:
    torch.set_num_threads(1)
    spec, gpu = shape.spec(), find_gpu(split.prefill, vram_gib)
    torch.cuda.set_device(gpu.device)
    weights = RandomModel(spec, shape.distinct)
    # The CPUs that no worker of the pool sits on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-split.spare_cpus :])
    session = PrefillSession(spec, weights, gpu, wanted_tokens=tokens)
    session.ranges.wait(session.ranges.num_ranges - 1)
    batch, pages = batch_of(spec, tokens), pages_for(spec, tokens)
    streamer = session.model.streamer
    with torch.inference_mode():
        session.model.forward(batch, pages)
        connection.send("ready")
        while (order := connection.recv())[0] != "end":
            work, streamer.share = order
            began_at = time.monotonic()
            if work == "sweep":
                session.model.forward(batch, pages)
            else:
                # All of a sweep's copies, in its order, and nothing that uses them.
                for item in session.layout.items:
                    streamer.take(item.key)
                    streamer.release()
            torch.cuda.synchronize()
            connection.send(time.monotonic() - began_at)
    session.close()
