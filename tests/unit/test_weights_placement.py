"""Placement on NUMA nodes: the rule, what the kernel says, and shards that add up to the whole."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headwater.convert.linear_formats import LinearTarget
from headwater.errors import NotPermittedError, SegmentError
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.layer_spec import LinearFormat
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.shm import Lifetime, Segment, SegmentKind
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import make_config
from headwater.weights import loader
from headwater.weights.loader import load_weights
from headwater.weights.placement import (
    check_placement,
    memory_nodes,
    place,
    shard_ranges,
)
from headwater.weights.store import WeightsStore
from headwater.weights.tensors import DType, TensorEntry

BLOCK_TOKENS = 8
ENTRIES = (
    TensorEntry("embed", DType.BF16, (64, 64), 4096),
    TensorEntry("layers.0.experts.gate_up", DType.U8, (3, 2, 2, 64, 128), 16384),
    TensorEntry("layers.0.experts.down", DType.U8, (3, 2, 128, 64), 131072),
)


@pytest.fixture
def segment(shm_prefix: str) -> Iterator[Segment]:
    made = Segment.create(
        f"{shm_prefix}.w", 1 << 20, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.BOUND
    )
    try:
        made.place([(0, 8192)], [memory_nodes()[0]])
    except NotPermittedError:
        made.close()
        pytest.skip("mbind is not permitted here; give the container the capability SYS_NICE")
    yield made
    made.close()


def test_every_byte_of_the_experts_belongs_to_one_shard() -> None:
    found = shard_ranges(ENTRIES, 2, (0, 5))
    assert [shard.node for shard in found] == [0, 5]
    assert found[0].ranges[:2] == ((16384, 16384), (16384 + 32768, 16384))
    assert found[1].ranges[0] == (16384 + 16384, 16384)
    covered = sorted(piece for shard in found for piece in shard.ranges)
    assert sum(size for _, size in covered) == sum(e.num_bytes for e in ENTRIES[1:])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(covered))
    four = TensorEntry("layers.0.experts.down", DType.U8, (1, 4, 8, 8), 0)
    assert [shard.node for shard in shard_ranges([four], 4, (1, 3))] == [1, 1, 3, 3]


def test_this_machine_places_and_finds_pages(segment: Segment) -> None:
    nodes = memory_nodes()
    place(segment, ENTRIES, 2, nodes)
    segment.populate(0, 1 << 20)
    found = check_placement(segment, ENTRIES, 2, nodes)
    assert (found.misplaced_pages, found.problem) == (0, "")
    assert found.checked_pages > 1000
    elsewhere = check_placement(segment, ENTRIES, 2, (max(nodes) + 1,))
    assert elsewhere.misplaced_pages == elsewhere.checked_pages


def test_a_node_that_is_not_there_is_an_error(segment: Segment) -> None:
    with pytest.raises(SegmentError, match="mbind: Invalid argument"):
        segment.place([(0, 8192)], [1000])
    with pytest.raises(SegmentError, match="outside its payload"):
        segment.place([(0, 2 << 20)], [0])


def test_a_load_goes_on_where_placing_is_forbidden(
    tmp_path: Path,
    shm_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*arguments: object) -> None:
        raise NotPermittedError("mbind: Operation not permitted")

    monkeypatch.setattr(Segment, "place", refuse)
    monkeypatch.setattr(Segment, "nodes_of", refuse)
    write_synthetic(tmp_path / "m", make_config("tiny", "mixtral"), LinearTarget("bf16"))
    with caplog.at_level(logging.WARNING, loader.logger.name):
        store = _load(tmp_path / "m", shm_prefix, 2)
    assert "not permitted; give the container the capability SYS_NICE" in caplog.text
    assert store.placement is not None
    assert "cannot be checked: mbind" in store.placement.problem
    store.close()


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4", "mxfp4"])
def test_shards_add_up_to_the_whole(fmt: LinearFormat, tmp_path: Path, shm_prefix: str) -> None:
    folder = tmp_path / "m"
    config = make_config("tiny", "deepseek_v3") | {"moe_intermediate_size": 512}
    write_synthetic(folder, config, LinearTarget(fmt))
    whole = _load(folder, shm_prefix, 1)
    expected = _hidden(whole)
    assert whole.placement is None
    for shards in (2, 4):
        store = _load(folder, shm_prefix, shards)
        assert store.segment.name != whole.segment.name
        assert store.placement is not None
        assert len(store.placement.nodes) == shards
        assert store.placement.misplaced_pages == 0
        _assert_cut(whole, store, shards)
        torch.testing.assert_close(_hidden(store), expected, rtol=1e-4, atol=1e-4)
        store.close()
        again = _load(folder, shm_prefix, shards)
        assert again.was_reattached
        assert again.placement is not None
        again.close()
    whole.close()


def _assert_cut(whole: WeightsStore, store: WeightsStore, shards: int) -> None:
    """Shards, put together again, are the very bytes of the whole."""
    for name, entry in whole.entries.items():
        if ".experts." not in name:
            continue
        parts = store.tensor(name).unbind(1)
        assert len(parts) == shards
        is_down = ".down" in name
        joined = torch.cat([part.view(torch.uint8) for part in parts], dim=-1 if is_down else -2)
        assert torch.equal(joined, whole.tensor(name).view(torch.uint8))
        assert math.prod(entry.shape) == math.prod(store.entries[name].shape)


def _load(folder: Path, shm_prefix: str, shards: int) -> WeightsStore:
    tensors = ModelSpec.load(folder).tensors(shards)
    return load_weights(folder, tensors, shm_prefix=shm_prefix, shards=shards)


def _hidden(store: WeightsStore) -> torch.Tensor:
    spec = ModelSpec.from_json(store.config_json, "config.json")
    layout = KvLayout.of(spec, num_blocks=4, block_tokens=BLOCK_TOKENS)
    chunk = SequenceChunk(list(range(20)), 0, [0, 1, 2])
    with torch.inference_mode():
        batch = Batch.build([chunk], BLOCK_TOKENS)
        return Transformer(spec, store).forward(batch, KvPages.allocate(layout))
