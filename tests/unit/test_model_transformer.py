"""The transformer's promises that do not need a reference: batches, memory, stale pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.kv.pages import KvPages
from headwater.model import attention
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.layer_spec import RopeSpec
from headwater.model.rope import RotaryTable
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.weights.loader import load_weights
from tests.nan_pages import nan_pages

BLOCK_TOKENS = 4
PROMPT = [3, 250, 17, 17, 99, 4, 8, 200, 31, 77, 5]


@pytest.fixture
def model(tiny_model: Path, shm_prefix: str) -> Iterator[Transformer]:
    spec = ModelSpec.from_config(
        json.loads((tiny_model / "config.json").read_text()), "config.json"
    )
    store = load_weights(tiny_model, spec.tensors(), shm_prefix=shm_prefix)
    with torch.inference_mode():
        yield Transformer(spec, store)
    store.segment.unlink()
    store.close()


def _pages(spec: ModelSpec) -> KvPages:
    """Pages full of NaN: whatever is read without having been written shows."""
    return nan_pages(spec, num_blocks=12, block_tokens=BLOCK_TOKENS)


def _run(model: Transformer, pages: KvPages, *chunks: SequenceChunk) -> Tensor:
    return model.logits(model.forward(Batch.build(chunks, BLOCK_TOKENS), pages))


def test_where_the_blocks_lie_does_not_matter(model: Transformer) -> None:
    ordered = _run(model, _pages(model.spec), SequenceChunk(PROMPT, 0, [0, 1, 2]))
    scattered = _run(model, _pages(model.spec), SequenceChunk(PROMPT, 0, [9, 3, 7]))
    assert torch.isfinite(ordered).all()
    assert torch.equal(ordered, scattered)


def test_a_cached_prefix_may_be_shared(model: Transformer) -> None:
    pages = _pages(model.spec)
    whole = _run(model, pages, SequenceChunk(PROMPT, 0, [0, 1, 2]))
    again = _run(model, pages, SequenceChunk(PROMPT[8:], 8, [0, 1, 5]))
    torch.testing.assert_close(again, whole[8:], rtol=1e-2, atol=1e-2)


def test_scores_in_small_pieces(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _run(model, _pages(model.spec), SequenceChunk(PROMPT, 0, [0, 1, 2]))
    monkeypatch.setattr(attention, "MAX_SCORES", 100)
    pieces = _run(model, _pages(model.spec), SequenceChunk(PROMPT, 0, [0, 1, 2]))
    torch.testing.assert_close(pieces, whole, rtol=1e-2, atol=1e-2)


def test_scores_are_bounded() -> None:
    chunks = list(attention.causal_chunks(num_queries=5000, start=95000, num_heads=32))
    assert chunks[0][0] == 0
    assert chunks[-1][1:] == (5000, 100000)
    assert [stop for _, stop, _ in chunks[:-1]] == [first for first, _, _ in chunks[1:]]
    assert all((stop - first) * 32 * keys <= attention.MAX_SCORES for first, stop, keys in chunks)


def test_batch_places_tokens() -> None:
    batch = Batch.build(
        [SequenceChunk([7, 8, 9], 3, [5, 2]), SequenceChunk([4], 0, [1])], BLOCK_TOKENS
    )
    assert batch.token_ids.tolist() == [7, 8, 9, 4]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.blocks.tolist() == [5, 2, 2, 1]
    assert batch.offsets.tolist() == [3, 0, 1, 0]
    assert batch.last_rows.tolist() == [2, 3]
    assert [span.num_tokens for span in batch.spans] == [6, 1]


def test_batch_refuses_tokens_without_a_block() -> None:
    with pytest.raises(AssertionError, match="blocks end before the tokens"):
        Batch.build([SequenceChunk([1, 2], 3, [0])], BLOCK_TOKENS)


def test_rotary_table_grows() -> None:
    spec = RopeSpec("linear", 8, 100.0, factor=2.0)
    cos, sin = RotaryTable(spec).rows(torch.tensor([0, 5000]), 5000)
    angles = 5000 / 2.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(cos[1, 0], angles.cos(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sin[1, 0], angles.sin(), rtol=1e-3, atol=1e-3)
    assert torch.equal(cos[0], torch.ones(1, 4))
