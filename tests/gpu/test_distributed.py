"""Several ranks over gloo against one: stripes, experts in parallel, the loss of a rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.gpu import precision
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.portion import portion_of
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import HostQueues
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.spec import ModelSpec
from tests.gpu.models import BLOCK_TOKENS, prompt, tiny_weights
from tests.gpu.ranks import float_pages, run_rank
from tests.gpu.samples import relative_error

TIMEOUT_SECONDS = 250
NEVER = 99


def _cases(spec: ModelSpec) -> list[list[tuple[list[int], int, list[int]]]]:
    """A prompt and a short one; one token, so that some ranks have none; odd lengths."""
    return [
        [(prompt(spec, 45, 1), 0, list(range(20, 32))), (prompt(spec, 5, 2), 0, [3, 5])],
        [(prompt(spec, 1, 3), 0, [7])],
        [(prompt(spec, 23, 4), 0, list(range(6)))],
    ]


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the ranks do: see compute_in_fp32."""
    monkeypatch.setattr(precision, "ROUNDED", torch.float32)
    monkeypatch.setattr(precision, "IN_ATTENTION", torch.float32)
    monkeypatch.setattr(precision, "CACHED", torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _run_ranks(
    world_size: int, folder: Path, model_dir: Path, segment: str, cases: Any, dies_at: int
) -> list[Any]:
    """What each rank saved; those that died saved nothing."""
    # The server imports torch once for all ranks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.gpu.ranks"])
    ranks = [
        context.Process(
            target=run_rank,
            args=(rank, world_size, folder, model_dir, segment, cases, dies_at),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_SECONDS)
        assert not process.is_alive(), "a rank hangs"
    paths = [folder / f"rank-{world_size}-{rank}-{dies_at}" for rank in range(world_size)]
    return [torch.load(path, weights_only=True) for path in paths if path.exists()]


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_moe"])
def test_ranks_compute_what_one_computes(
    tmp_path: Path, shm_prefix: str, fp32: None, architecture: str
) -> None:
    with tiny_weights(tmp_path, shm_prefix, architecture, "bf16") as (spec, weights):
        cases = _cases(spec)
        layout = lay_out(spec, weights, group_bytes=1 << 20)
        plan = MemoryPlan(2, 2, 1 << 10, 0, 0)
        model = StreamedModel(spec, weights, layout, plan, HostQueues())
        expected = []
        for case in cases:
            pages = float_pages(spec)
            batch = Batch.build([SequenceChunk(*chunk) for chunk in case], BLOCK_TOKENS)
            expected.append((model.forward(batch, pages), pages.layers))
        model_dir = tmp_path / f"{architecture}-bf16"
        for world_size in (1, 2, 3) if architecture == "deepseek_v3" else (2,):
            found = _run_ranks(world_size, tmp_path, model_dir, weights.segment.name, cases, NEVER)
            assert [r for rank in found for r in rank if isinstance(r, str)] == []
            assert len(found) == world_size
            for number, (hidden, layers) in enumerate(expected):
                for rank in found:
                    assert relative_error(rank[number][0], hidden) < 1e-5
                # Each rank writes its own rows' entries, and no others.
                for layer, whole in enumerate(layers):
                    parts = torch.stack([rank[number][1][layer] for rank in found])
                    assert ((~parts.isnan()).sum(dim=0) == (~whole.isnan())).all()
                    joined, target = parts.nan_to_num(0).sum(dim=0), whole.nan_to_num(0)
                    assert relative_error(joined.float(), target.float()) < 1e-5


def test_a_lost_rank_ends_the_prompt_with_a_sentence(tmp_path: Path, shm_prefix: str) -> None:
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "bf16") as (spec, weights):
        found = _run_ranks(
            2, tmp_path, tmp_path / "mixtral-bf16", weights.segment.name, _cases(spec), 1
        )
        (survivor,) = found
        assert torch.isfinite(survivor[0][0]).all()
        assert survivor[1].startswith("UnavailableError: gpu: rank 0 of 2 lost another one")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [(1,), (2, 7), (100, 3, 41)])
def test_stripes_cover_every_row_once_and_share_the_work(
    world_size: int, lengths: tuple[int, ...]
) -> None:
    chunks = [SequenceChunk([1] * n, 0, list(range(40))) for n in lengths]
    batch = Batch.build(chunks, BLOCK_TOKENS)
    portions = [portion_of(batch, rank, world_size) for rank in range(world_size)]
    rows = torch.cat(portions[0].rows_by_rank)
    assert rows.sort().values.tolist() == list(range(sum(lengths)))
    work = []
    for rank, portion in enumerate(portions):
        mine = portion.rows_by_rank[rank]
        assert torch.equal(portion.positions, batch.positions[mine])
        seen = 0
        for span, parts in portion.parts:
            for part in parts:
                positions = portion.positions[part.rows]
                first = span.start + part.first
                assert positions.tolist() == list(range(first, first + part.count))
                seen += int(positions.sum()) + part.count
        work.append(seen)
    if min(lengths) >= 2 * world_size:
        assert max(work) < 1.6 * min(work)
