"""Greedy decoding in one process, with private memory: what the three processes must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.config import KvConfig
from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.spec import ModelSpec
from headwater.weights.loader import load_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def greedy(
    model_dir: Path, shm_prefix: str, prompt: Sequence[int], num_tokens: int
) -> list[tuple[int, float]]:
    """The next `num_tokens` tokens and their log probabilities, on one thread, without stopping."""
    spec = ModelSpec.load(model_dir)
    store = load_weights(model_dir, spec.tensors(), shm_prefix=f"{shm_prefix}.reference")
    workers = WorkerPool(1)
    prefill = NativeTransformer(spec, store, workers, mode=Mode.PREFILL)
    decode = NativeTransformer(spec, store, workers, mode=Mode.DECODE)
    block_tokens = KvConfig().block_tokens
    num_blocks = -(-(len(prompt) + num_tokens) // block_tokens)
    pages = KvPages.allocate(KvLayout.of(spec, num_blocks=num_blocks, block_tokens=block_tokens))
    blocks = tuple(range(num_blocks))
    chunk, position = tuple(prompt), 0
    chosen: list[tuple[int, float]] = []
    try:
        with torch.inference_mode():
            for _ in range(num_tokens):
                batch = Batch.build([SequenceChunk(chunk, position, blocks)], block_tokens)
                model = decode if chosen else prefill
                scores = decode.logits(model.forward(batch, pages)[-1:])[0]
                token = int(scores.argmax())
                chosen.append((token, float(torch.log_softmax(scores, 0)[token])))
                position += len(chunk)
                chunk = (token,)
    finally:
        store.close()
    return chosen
