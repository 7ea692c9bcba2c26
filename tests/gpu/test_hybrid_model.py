"""Answers by decoder and CPU kernels together, over pages, against the CPU kernels alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.errors import ConfigError, ResourceError
from headwater.gpu.decode_plan import plan_decode, resident_bytes
from headwater.gpu.device import find_gpu
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.hybrid_model import HybridModel
from headwater.gpu.hybrid_session import start_hybrid
from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvKind
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config
from tests.gpu.models import BLOCK_TOKENS, pages_of, prompt, run, tiny_weights, written
from tests.gpu.samples import relative_error

CPU = torch.device("cpu")
GIB = 2**30
# Rows and tokens of the cache: a fourth sequence, and tokens from the 24th on, go to the CPU.
ROWS, CONTEXT = 3, 24
LENGTHS, STEPS = (5, 9, 17, 2), 12
BLOCKS = [list(range(8 * i, 8 * i + 8)) for i in range(len(LENGTHS))]


@contextmanager
def _models(
    folder: Path, prefix: str, architecture: str
) -> Iterator[tuple[ModelSpec, HybridModel, NativeTransformer]]:
    with tiny_weights(folder, prefix, architecture, "bf16") as (spec, weights):
        pool = WorkerPool(2)
        on_cpu = NativeTransformer(spec, weights, pool, mode=Mode.DECODE)
        decoder = HybridDecoder(
            spec, weights, pool, CPU, max_rows=ROWS, max_context=CONTEXT, lanes=2
        )
        yield spec, HybridModel(decoder, on_cpu), on_cpu


def _step(
    model: HybridModel | NativeTransformer,
    pages: KvPages,
    tokens: list[list[int]],
    counts: dict[int, int],
    computed: list[int],
) -> Tensor:
    """So many tokens of each sequence named; gives the last hidden state of each."""
    chunks = [
        SequenceChunk(
            tokens[i][computed[i] : computed[i] + n], computed[i], BLOCKS[i], sequence_id=100 + i
        )
        for i, n in counts.items()
    ]
    batch = Batch.build(chunks, BLOCK_TOKENS)
    return model.forward(batch, pages)[batch.last_rows]


def test_logits_are_those_of_the_states_that_are_given(tmp_path: Path, shm_prefix: str) -> None:
    """Of the latest step's, in the batch's order or not, of some of them, of others, and again."""
    with _models(tmp_path, shm_prefix, "qwen3_moe") as (spec, hybrid, on_cpu):
        tokens = [prompt(spec, n + 3, seed) for seed, n in enumerate(LENGTHS)]
        pages = pages_of(spec)
        for i, n in enumerate(LENGTHS):
            run(on_cpu, pages, SequenceChunk(tokens[i][:n], 0, BLOCKS[i]))
        computed = list(LENGTHS)
        for order in ([0, 1, 2], [2, 0, 1], [1]):
            found = _step(hybrid, pages, tokens, dict.fromkeys(order, 1), computed)
            for i in order:
                computed[i] += 1
            for states in (found, found[:1], torch.randn(2, spec.hidden_size), found):
                expected = on_cpu.logits(states).clone()
                assert relative_error(hybrid.logits(states).clone(), expected) < 1e-2


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_moe"])
def test_rows_and_pages_agree_with_the_cpu(
    tmp_path: Path, shm_prefix: str, architecture: str
) -> None:
    """Sequences that come, pause, go on with several tokens at once, and outgrow the cache."""
    with _models(tmp_path, shm_prefix, architecture) as (spec, hybrid, on_cpu):
        tokens = [prompt(spec, n + 2 * STEPS, seed) for seed, n in enumerate(LENGTHS)]
        mine, theirs = pages_of(spec), pages_of(spec)
        for pages in (mine, theirs):
            for i, n in enumerate(LENGTHS):
                run(on_cpu, pages, SequenceChunk(tokens[i][:n], 0, BLOCKS[i]))
        computed = list(LENGTHS)
        errors = []
        for turn in range(STEPS):
            # All four, then without one after the other; once, some recompute three tokens.
            counts = {i: 1 for i in range(len(LENGTHS)) if turn % 5 != i + 1}
            if turn == 7:
                counts |= {0: 3, 2: 2}
            found = _step(hybrid, mine, tokens, counts, computed)
            expected = _step(on_cpu, theirs, tokens, counts, computed)
            errors += [relative_error(*pair) for pair in zip(found, expected, strict=True)]
            for i, n in counts.items():
                computed[i] += n
        errors.sort()
        # A near tie of a gate may fall the other way.
        assert errors[int(0.7 * len(errors))] < 2e-2
        assert hybrid.num_device_steps == STEPS
        assert hybrid.pulled_bytes > 0
        assert hybrid.num_right <= hybrid.num_predicted
        assert (hybrid.fetched_bytes > 0) == (hybrid.num_predicted > 0)
        is_mla = spec.kv.kind is KvKind.MLA
        for i, count in enumerate(computed):
            pairs = [written(p, BLOCKS[i], count, is_mla).float() for p in (mine, theirs)]
            assert bool(torch.isfinite(pairs[0]).all()), "an entry was not written"
            assert relative_error(pairs[0][0], pairs[1][0]) < 1e-2
        assert max(computed) > CONTEXT
        logits = hybrid.logits(found)
        assert relative_error(logits, on_cpu.logits(found)) < 5e-3


def test_what_fits_is_planned_before_anything_is_allocated() -> None:
    """DeepSeek-V3 in FP8 on cards of 24, 32 and 141 GB."""
    config = make_config("deepseek-v3") | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
    }
    spec = ModelSpec.from_config(config, "config.json")
    stored = [
        (t.name, torch.Size(t.shape).numel(), 2 if t.dtypes[-1].item_bytes == 2 else 1)
        for t in spec.tensors()
    ]
    weight_bytes = resident_bytes(spec, stored)
    assert 15 * GIB < weight_bytes < 20 * GIB
    with pytest.raises(ResourceError, match=r"decode needs at least 1\d\.\d GiB .* gpu\.decode"):
        plan_decode(spec, weight_bytes, 12 * GIB, wanted_rows=16, wanted_context=163840)
    small = plan_decode(spec, weight_bytes, 21 * GIB, wanted_rows=16, wanted_context=163840)
    large = plan_decode(spec, weight_bytes, 130 * GIB, wanted_rows=16, wanted_context=163840)
    assert 1 <= small.rows < 16
    assert small.context >= 8192
    assert large.rows == 16
    assert large.context > 65536
    for plan, available in ((small, 21 * GIB), (large, 130 * GIB)):
        assert plan.total_bytes <= available
    modest = plan_decode(spec, weight_bytes, 130 * GIB, wanted_rows=4, wanted_context=1000)
    assert (modest.rows, modest.context) == (4, 1024)


def test_started_within_a_bound(tmp_path: Path, shm_prefix: str) -> None:
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "fp8") as (spec, weights):
        pool = WorkerPool(2)
        on_cpu = NativeTransformer(spec, weights, pool)
        with pytest.raises(ResourceError, match="decode needs at least 1"):
            start_hybrid(
                on_cpu, weights, pool, CPU, available_bytes=GIB, max_batch=4, max_context=512
            )
        model = start_hybrid(
            on_cpu, weights, pool, CPU, available_bytes=2 * GIB, max_batch=2, max_context=512
        )
        assert model.is_on_device
        assert model.dual_speedup == 0.0


def test_one_sentence_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device .* set gpu\.decode to off to compute"):
        find_gpu(0, purpose="decode")
