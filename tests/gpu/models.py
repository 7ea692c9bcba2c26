"""Tiny synthetic models of every family and format, their reference, and what a sweep gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.interface import Model
from headwater.model.layer_spec import LinearFormat
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config
from tests.nan_pages import nan_pages

if TYPE_CHECKING:
    from headwater.weights.store import WeightsStore

BLOCK_TOKENS = 4
NUM_BLOCKS = 40


@contextmanager
def tiny_weights(
    folder: Path, prefix: str, architecture: str, fmt: LinearFormat, shards: int = 1
) -> Iterator[tuple[ModelSpec, WeightsStore]]:
    """A synthetic model in shared memory."""
    # These need the native extension, which check_device.py does without.
    from headwater.convert.linear_formats import LinearTarget
    from headwater.synth.checkpoint import write_synthetic
    from headwater.weights.loader import load_weights

    path = folder / f"{architecture}-{fmt}"
    write_synthetic(path, make_config("tiny", architecture, layers=4), LinearTarget(fmt))
    spec = ModelSpec.load(path)
    store = load_weights(path, spec.tensors(shards), shm_prefix=prefix, shards=shards)
    try:
        with torch.inference_mode():
            yield spec, store
    finally:
        store.segment.unlink()
        store.close()


def pages_of(spec: ModelSpec) -> KvPages:
    """Pages full of NaN: whatever is read without having been written shows."""
    return nan_pages(spec, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)


def prompt(spec: ModelSpec, count: int, seed: int) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (count,), generator=generator).tolist()


def run(model: Model, pages: KvPages, *chunks: SequenceChunk) -> Tensor:
    """Hidden states after the last layer, on the host."""
    return model.forward(Batch.build(chunks, BLOCK_TOKENS), pages).cpu()


def written(pages: KvPages, blocks: list[int], num_tokens: int, is_mla: bool) -> Tensor:
    """The entries of a sequence, of all layers."""
    layers = []
    for layer in pages.layers:
        found = layer[blocks]
        found = found if is_mla else found.transpose(1, 2)
        layers.append(found.flatten(0, 1)[:num_tokens].flatten(1))
    return torch.stack(layers)
