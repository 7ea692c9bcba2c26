"""Whole decode steps and prompts of a checkpoint, against reading the bytes that they must read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.timing import ReadProbe, alternate, worker_pool
from headwater.kernels import Mode, WorkerPool, isa
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.spec import ModelSpec
from headwater.shm import reap
from headwater.weights.loader import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from headwater.weights.store import WeightsStore

BLOCK_TOKENS = 16


def bench_model(
    folder: Path, what: str, batch: int, threads: int, *, context: int = 128
) -> dict[str, Any]:
    """One row: `what` is "decode", a step of `batch` sequences, or "prefill", `batch` tokens."""
    prefix = f"hwbench-{os.getpid()}"
    spec = ModelSpec.load(folder)
    store = load_weights(folder, spec.tensors(), shm_prefix=prefix)
    try:
        with worker_pool(threads) as pool:
            return _measure(spec, store, folder.name, what, batch, pool, context)
    finally:
        store.close()
        reap(f"{prefix}.", release_weights=True)


def _measure(
    spec: ModelSpec,
    store: WeightsStore,
    name: str,
    what: str,
    batch: int,
    pool: WorkerPool,
    context: int,
) -> dict[str, Any]:
    is_decode = what == "decode"
    model = NativeTransformer(spec, store, pool, mode=Mode.DECODE if is_decode else Mode.PREFILL)
    num_sequences, length = (batch, context + 1) if is_decode else (1, batch)
    blocks_each = -(-length // BLOCK_TOKENS)
    pages = KvPages.allocate(
        KvLayout.of(spec, num_blocks=num_sequences * blocks_each, block_tokens=BLOCK_TOKENS)
    )
    tokens = [(7 * i + 3) % spec.vocab_size for i in range(length)]
    chunks = []
    for i in range(num_sequences):
        blocks = range(i * blocks_each, (i + 1) * blocks_each)
        if is_decode:
            chunks.append(SequenceChunk(tokens[context:], context, blocks))
        else:
            chunks.append(SequenceChunk(tokens, 0, blocks))

    def run() -> None:
        step = Batch.build(chunks, BLOCK_TOKENS)
        model.logits(model.forward(step, pages)[step.last_rows])

    with torch.inference_mode():
        timed = alternate(run, ReadProbe(pool))
    num_bytes = _bytes_read(spec, store, batch)
    gb_per_s = num_bytes / timed.seconds / 1e9
    return {
        "what": what,
        "shape": name,
        "format": _format(store),
        "batch": batch,
        "threads": pool.num_threads,
        "isa": isa(),
        "us": timed.seconds * 1e6,
        "gb_per_s": gb_per_s,
        "read_gb_per_s": timed.read_gb_per_s,
        "ratio": gb_per_s / timed.read_gb_per_s,
        "tokens_per_s": batch / timed.seconds,
    }


def _bytes_read(spec: ModelSpec, store: WeightsStore, batch: int) -> float:
    """Weight bytes of a step: all but the embedding, and those experts that are likely hit."""
    total = 0.0
    for entry in store.entries.values():
        parts = entry.name.split(".")
        if parts[0] == "embed" and not spec.is_embedding_tied:
            continue
        share = 1.0
        if "experts" in parts:
            ffn = spec.layers[int(parts[1])].ffn
            assert isinstance(ffn, MoeFfnSpec)
            share = 1 - (1 - ffn.experts_per_token / ffn.num_experts) ** batch
        total += share * entry.num_bytes
    return total


def _format(store: WeightsStore) -> str:
    """The element type of most bytes."""
    sizes: dict[str, int] = {}
    for entry in store.entries.values():
        sizes[entry.dtype.value] = sizes.get(entry.dtype.value, 0) + entry.num_bytes
    return max(sizes, key=lambda name: sizes[name])
