"""Every family and format against transformers, however the tokens are cut into batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwater.kernels import Mode
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model import ffn, gqa, mla, moe, transformer
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from tests.golden.conftest import Golden
from tests.golden.golden_models import PROMPT_TOKENS

BLOCK_TOKENS = 8
# Out of order, and not next to each other, as blocks of a used pool are.
BLOCK_IDS = ([5, 2, 11, 0], [1, 3, 4, 6], [20, 19, 18, 16])
MAX_RELATIVE_ERROR = 1e-2

AnyModel = Transformer | NativeTransformer
MODES = [None, Mode.DECODE, Mode.PREFILL]

# A schedule is a list of batches; a batch is a list of (prompt, first token, end of tokens).
Schedule = list[list[tuple[int, int, int]]]
LAST = PROMPT_TOKENS
SCHEDULES: dict[str, Schedule] = {
    "whole": [[(0, 0, LAST)]],
    "chunked": [[(0, 0, 7)], [(0, 7, 8)], [(0, 8, 24)], [(0, 24, LAST)]],
    "stepwise": [[(0, i, i + 1)] for i in range(LAST)],
    "packed": [
        [(0, 0, 20), (1, 0, 3)],
        [(0, 20, 21), (1, 3, 17), (2, 0, LAST)],
        [(1, 17, 18), (0, 21, 22)],
        [(0, 22, LAST), (1, 18, LAST)],
    ],
}
# Every prompt by itself, in one piece.
ALONE: Schedule = [[(prompt, 0, LAST)] for prompt in range(len(BLOCK_IDS))]


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("mode", MODES)
def test_logits_match_transformers(
    golden: Golden, load_model: Callable[..., AnyModel], mode: Mode | None, schedule: str
) -> None:
    model = load_model(golden.folder, mode)
    pages = KvPages.allocate(_layout(model.spec))
    for prompt, logits in _run(model, pages, golden.prompts, SCHEDULES[schedule]).items():
        assert _relative_error(logits, golden.logits[prompt]) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.PREFILL])
def test_no_bit_depends_on_the_schedule(
    golden: Golden, load_model: Callable[..., AnyModel], mode: Mode
) -> None:
    """In native code, where nothing else is in a token's result than its own sequence."""
    model = load_model(golden.folder, mode)
    expected = _run(model, KvPages.allocate(_layout(model.spec)), golden.prompts, ALONE)
    for schedule in SCHEDULES.values():
        pages = KvPages.allocate(_layout(model.spec))
        for prompt, logits in _run(model, pages, golden.prompts, schedule).items():
            assert torch.equal(logits, expected[prompt])


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_four_bits_match_transformers(
    four_bit_golden: Golden, load_model: Callable[..., AnyModel], mode: Mode | None, shards: int
) -> None:
    model = load_model(four_bit_golden.folder, mode, shards)
    pages = KvPages.allocate(_layout(model.spec))
    for prompt, logits in _run(model, pages, four_bit_golden.prompts, SCHEDULES["packed"]).items():
        assert _relative_error(logits, four_bit_golden.logits[prompt]) < MAX_RELATIVE_ERROR


def test_only_rounding_separates_us_from_transformers(
    golden: Golden,
    load_model: Callable[..., AnyModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (ffn, gqa, mla, moe, transformer):
        monkeypatch.setattr(module, "round_activations", lambda x: x)
    model = load_model(golden.folder)
    pages = KvPages.allocate(_layout(model.spec))
    pages = KvPages([layer.float() for layer in pages.layers], BLOCK_TOKENS)
    for prompt, logits in _run(model, pages, golden.prompts, SCHEDULES["packed"]).items():
        assert _relative_error(logits, golden.logits[prompt]) < 1e-5


def _layout(spec: ModelSpec) -> KvLayout:
    return KvLayout.of(spec, num_blocks=21, block_tokens=BLOCK_TOKENS)


def _run(model: AnyModel, pages: KvPages, prompts: Tensor, schedule: Schedule) -> dict[int, Tensor]:
    """Logits [T, vocabulary] of every prompt that the schedule runs."""
    parts: dict[int, list[Tensor]] = {}
    for entries in schedule:
        chunks = [
            SequenceChunk(prompts[prompt, first:stop].tolist(), first, BLOCK_IDS[prompt])
            for prompt, first, stop in entries
        ]
        logits = model.logits(model.forward(Batch.build(chunks, BLOCK_TOKENS), pages))
        sizes = [len(chunk.token_ids) for chunk in chunks]
        for (prompt, _, _), part in zip(entries, torch.split(logits, sizes), strict=True):
            parts.setdefault(prompt, []).append(part)
    return {prompt: torch.cat(pieces) for prompt, pieces in parts.items()}


def _relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())
