"""Several ranks as processes over gloo: what each of them runs, for test_distributed.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from headwater.gpu import precision
from headwater.gpu.exchange import Exchange
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.peers import Peers
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import HostQueues
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.spec import ModelSpec
from headwater.shm import Segment
from headwater.weights.store import WeightsStore
from tests.gpu.models import BLOCK_TOKENS, pages_of


def compute_in_fp32() -> None:
    """Rounds no activations, and adds in one order: what is left is how the work is shared out."""
    torch.set_num_threads(1)
    precision.ROUNDED = precision.IN_ATTENTION = precision.CACHED = torch.float32


def float_pages(spec: ModelSpec) -> KvPages:
    """Pages in FP32, full of NaN."""
    pages = pages_of(spec)
    return KvPages([layer.float() for layer in pages.layers], pages.block_tokens)


def run_rank(
    rank: int,
    world_size: int,
    folder: Path,
    model_dir: Path,
    segment: str,
    cases: list[list[tuple[list[int], int, list[int]]]],
    dies_at: int,
) -> None:
    """Computes each case, a batch of (tokens, start, blocks), and saves what came of it.

    The last rank ends without a word before case number `dies_at`; the others then note the error.
    """
    compute_in_fp32()
    meeting = folder / f"meeting-{world_size}-{dies_at}"
    peers = Peers.meet(meeting, rank, world_size, "gloo")
    spec = ModelSpec.load(model_dir)
    store = WeightsStore.from_segment(Segment.attach(segment))
    layout = lay_out(spec, store, rank=rank, world_size=world_size, group_bytes=1 << 20)
    plan = MemoryPlan(2, 2, 1 << 10, 0, 0)
    results: list[Any] = []
    with torch.inference_mode():
        model = StreamedModel(spec, store, layout, plan, HostQueues(), exchange=Exchange(peers))
        for number, case in enumerate(cases):
            if number == dies_at and rank == world_size - 1:
                os._exit(1)
            pages = float_pages(spec)
            batch = Batch.build([SequenceChunk(*chunk) for chunk in case], BLOCK_TOKENS)
            try:
                hidden = model.forward(batch, pages)
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
                break
            results.append((hidden, pages.layers))
    if len(results) == len(cases) and not isinstance(results[-1], str):
        peers.barrier()  # what a peer still has to read goes with the process
    torch.save(results, folder / f"rank-{world_size}-{rank}-{dies_at}")
    os._exit(0)  # gloo's threads may wait for a rank that is gone
