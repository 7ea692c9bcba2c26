"""Paged attention on every instruction set of this machine, against FP64 and against itself."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headwater.errors import InternalError
from headwater.kernels import WorkerPool, supported_isas
from headwater.kernels.attention import paged_attention
from headwater.model.batch import Batch, SequenceChunk
from tests.native.samples import relative_error, seeded

ISAS = supported_isas()
# Splits are 256 tokens long; contexts end before, at and after their borders.
SPLIT = 256


@dataclass(frozen=True)
class Problem:
    """Sequences with their keys and values in shuffled pages; NaN where nothing was written."""

    batch: Batch
    pages: Tensor
    queries: Tensor
    value_dim: int
    window: int
    sinks: Tensor | None

    def run(self, pool: WorkerPool, isa: str) -> Tensor:
        return paged_attention(
            pool,
            self.batch,
            self.pages,
            self.queries,
            value_dim=self.value_dim,
            window=self.window,
            sinks=self.sinks,
            isa=isa,
        )

    def expected(self) -> Tensor:
        """The same in FP64, one query after the other."""
        outputs = []
        for span in self.batch.spans:
            keys, values = self._context(span.block_ids, span.num_tokens)
            group = self.queries.shape[1] // keys.shape[1]
            for i in range(span.num_new):
                stop = span.start + i + 1
                start = max(0, stop - self.window) if self.window else 0
                mine = keys[start:stop].repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,nhd->hn", self.queries[span.first_row + i].double(), mine)
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks.double()[:, None]), dim=1)
                weights = scores.softmax(dim=1)[:, : stop - start]
                theirs = values[start:stop].repeat_interleave(group, dim=1)
                outputs.append(torch.einsum("hn,nhd->hd", weights, theirs))
        return torch.stack(outputs)

    def _context(self, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values, FP64 [tokens, kv heads, dim]."""
        blocks = self.pages[block_ids].double()
        if self.pages.dim() == 3:
            entries = blocks.flatten(0, 1)[:num_tokens, None]
            return entries, entries[..., : self.value_dim]
        both = blocks.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        return both[0], both[1]


def make(
    rng: torch.Generator,
    spans: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    block_tokens: int = 16,
    window: int = 0,
    has_sinks: bool = False,
) -> Problem:
    """`spans` are (tokens before, new tokens); with a `value_dim` the pages are MLA's."""
    counts = [-(-(start + new) // block_tokens) for start, new in spans]
    order = torch.randperm(sum(counts) + 1, generator=rng).tolist()
    is_mla = value_dim is not None
    shape = (block_tokens, key_dim) if is_mla else (2, block_tokens, kv_heads, key_dim)
    pages = torch.full((len(order), *shape), torch.nan, dtype=torch.float16)
    chunks = []
    for (start, new), count in zip(spans, counts, strict=True):
        blocks = [order.pop() for _ in range(count)]
        for position in range(start + new):
            at = (blocks[position // block_tokens], position % block_tokens)
            where = at if is_mla else (at[0], slice(None), at[1])
            pages[where] = torch.randn(pages[where].shape, generator=rng).half()
        chunks.append(SequenceChunk([0] * new, start, blocks))
    batch = Batch.build(chunks, block_tokens)
    queries = torch.randn(len(batch.token_ids), heads, key_dim, generator=rng) * 3 / key_dim**0.5
    sinks = torch.randn(heads, generator=rng) if has_sinks else None
    return Problem(batch, pages, queries, value_dim or key_dim, window, sinks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("round_", range(6))
def test_gqa_of_random_shapes(
    request: pytest.FixtureRequest, pool: WorkerPool, isa: str, round_: int
) -> None:
    rng, choose = seeded(request)
    kv_heads = choose.randint(1, 4)
    problem = make(
        rng,
        [_span(choose) for _ in range(choose.randint(1, 4))],
        heads=kv_heads * choose.choice([1, 2, 3, 8, 70]),
        kv_heads=kv_heads,
        key_dim=choose.choice([1, 7, 16, 33, 64, 96, 128, 131]),
        block_tokens=choose.choice([1, 5, 16]),
        window=choose.choice([0, 0, 1, 40, 300]),
        has_sinks=choose.random() < 0.5,
    )
    assert relative_error(problem.run(pool, isa), problem.expected()) < 2e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("round_", range(4))
def test_mla_of_random_shapes(
    request: pytest.FixtureRequest, pool: WorkerPool, isa: str, round_: int
) -> None:
    rng, choose = seeded(request)
    value_dim = choose.choice([5, 64, 130])
    problem = make(
        rng,
        [_span(choose) for _ in range(choose.randint(1, 3))],
        heads=choose.choice([1, 4, 66]),
        kv_heads=1,
        key_dim=value_dim + choose.choice([2, 16]),
        value_dim=value_dim,
        block_tokens=choose.choice([3, 16]),
    )
    assert relative_error(problem.run(pool, isa), problem.expected()) < 2e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("context", [SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT, 5 * SPLIT + 77])
def test_contexts_across_splits(
    request: pytest.FixtureRequest, pool: WorkerPool, isa: str, context: int
) -> None:
    rng, _ = seeded(request)
    problem = make(rng, [(context - 1, 1), (context - 2, 2)], heads=6, kv_heads=2, key_dim=48)
    assert relative_error(problem.run(pool, isa), problem.expected()) < 2e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [0, 100])
def test_no_bit_depends_on_the_batch_or_the_threads(
    request: pytest.FixtureRequest, isa: str, window: int
) -> None:
    """A prompt whole, cut anyhow, among others and token by token; by 1, 2 and 5 threads."""
    rng, _ = seeded(request)
    length, other = 600, 40
    whole = make(
        rng,
        [(other, 2), (0, length)],
        heads=6,
        kv_heads=2,
        key_dim=40,
        window=window,
        has_sinks=True,
    )
    block_ids = whole.batch.spans[1].block_ids.tolist()
    expected = whole.run(WorkerPool(1), isa)[2:]
    for threads, cuts in ((5, [0]), (2, [0, 1, 300, 301, 599]), (1, list(range(length)))):
        pool = WorkerPool(threads)
        stops = [*cuts[1:], length]
        if len(cuts) == length:  # every 23rd is enough
            cuts, stops = cuts[::23], stops[::23]
        for start, stop in zip(cuts, stops, strict=True):
            chunk = SequenceChunk([0] * (stop - start), start, block_ids)
            part = Problem(
                Batch.build([chunk], 16),
                whole.pages,
                whole.queries[2 + start : 2 + stop].clone(),
                whole.value_dim,
                window,
                whole.sinks,
            )
            assert torch.equal(part.run(pool, isa), expected[start:stop])


def test_extreme_scores(pool: WorkerPool) -> None:
    """The greatest weight is 1 and the others vanish, wherever the greatest score lies."""
    for isa in ISAS:
        for position in (0, 255, 256, 511):
            rng = torch.Generator().manual_seed(1)
            problem = make(rng, [(511, 1)], heads=1, kv_heads=1, key_dim=8)
            block = problem.batch.spans[0].block_ids[position // 16]
            problem.pages[block, 0, position % 16] = 300.0
            problem.queries.fill_(100.0)
            value = problem.pages[block, 1, position % 16].float()
            torch.testing.assert_close(problem.run(pool, isa)[0], value, rtol=1e-6, atol=0)


def test_refuses_what_does_not_fit(pool: WorkerPool) -> None:
    rng = torch.Generator().manual_seed(1)
    problem = make(rng, [(3, 2)], heads=2, kv_heads=1, key_dim=8)
    with pytest.raises(InternalError, match=r"pages: expected FP16 \[..., 8\]"):
        paged_attention(pool, problem.batch, problem.pages.float(), problem.queries)
    with pytest.raises(InternalError, match="a block is not of the pool"):
        paged_attention(pool, problem.batch, problem.pages[:0], problem.queries)


def _span(choose: random.Random) -> tuple[int, int]:
    return choose.choice([(0, 1), (0, 37), (255, 1), (250, 30), (700, 1), (511, 3)])
