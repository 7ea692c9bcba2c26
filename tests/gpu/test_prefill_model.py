"""The streamed model, on a CPU, against the reference: every family, format and awkward batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.gpu import kernels
from headwater.gpu.kernels.experts import ExpertStack
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import HostQueues
from headwater.kv.layout import KvKind
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.layer_spec import LinearFormat, MoeFfnSpec
from headwater.model.linear import exact_activations
from headwater.model.source import Weights
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from tests.gpu.models import BLOCK_TOKENS, NUM_BLOCKS, pages_of, prompt, run, tiny_weights, written
from tests.gpu.samples import relative_error

NEVER, ALWAYS = 0, 1
BLOCKS = list(range(20, 36))
# Of one layer, relative to its result. FP16 activations: what is left is mostly that the reference
# rounds them to BF16. E4M3 ones: each of two products and what is between them is off by up to
# 2^-4, 2^-4 / sqrt(3) or less on average.
BARS = {NEVER: 5e-3, ALWAYS: 5e-2}


def _model(
    spec: ModelSpec, weights: Weights, *, expert_slots: int = 3, quantize_from: int = NEVER
) -> StreamedModel:
    layout = lay_out(spec, weights, group_bytes=1 << 20)
    plan = MemoryPlan(2, expert_slots, 1 << 10, 0, 0)
    return StreamedModel(spec, weights, layout, plan, HostQueues(), quantize_from=quantize_from)


def _error(ours: Tensor, theirs: Tensor, share: float = 0.9) -> float:
    """What `share` of the tokens stay below: at a near tie of its gate, one takes other experts."""
    errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    return float(errors.sort().values[int(share * len(errors))])


@pytest.mark.parametrize(
    ("architecture", "fmt", "shards", "quantize_from"),
    [
        ("deepseek_v3", "bf16", 1, NEVER),
        ("deepseek_v3", "fp8", 1, NEVER),
        ("deepseek_v3", "fp8", 2, ALWAYS),
        ("deepseek_v3", "int4", 2, NEVER),
        ("mixtral", "bf16", 4, NEVER),
        ("qwen3_moe", "fp8", 2, NEVER),
        ("qwen3_moe", "mxfp4", 1, NEVER),
        ("mixtral", "int4", 1, ALWAYS),
        ("mixtral", "fp8", 1, ALWAYS),
    ],
)
def test_agrees_with_the_reference(
    tmp_path: Path,
    shm_prefix: str,
    architecture: str,
    fmt: LinearFormat,
    shards: int,
    quantize_from: int,
) -> None:
    """Layer by layer from the reference's hidden states, two packed prompts; and all in all."""
    with tiny_weights(tmp_path, shm_prefix, architecture, fmt, shards) as (spec, weights):
        tokens = prompt(spec, 61, 1)
        batch = Batch.build(
            [
                SequenceChunk(tokens, 0, BLOCKS),
                SequenceChunk(prompt(spec, 9, 2), 0, [3, 5, 7]),
            ],
            BLOCK_TOKENS,
        )
        reference = Transformer(spec, weights)
        model = _model(spec, weights, quantize_from=quantize_from)
        expected_pages, pages = pages_of(spec), pages_of(spec)
        bar = BARS[quantize_from if fmt == "fp8" else NEVER]
        is_mla = spec.kv.kind is KvKind.MLA
        hidden = reference.embed(batch.token_ids)
        assert torch.equal(model.embed(batch.token_ids), hidden)
        for layer in range(spec.num_layers):
            ours = model.forward_layer(layer, hidden.clone(), batch, pages)
            hidden = reference.forward_layer(layer, hidden, batch, expected_pages)
            assert _error(ours, hidden) < bar
            kv = [written(p, BLOCKS, 61, is_mla)[layer] for p in (pages, expected_pages)]
            assert relative_error(*kv) < 3e-3
        # A token that took another expert is seen by those after it: what is left is a rough bound.
        assert relative_error(model.forward(batch, pages_of(spec)), hidden) < 4 * bar + 0.1


@pytest.mark.parametrize(
    ("fmt", "shards", "quantize_from"),
    [("bf16", 1, NEVER), ("fp8", 2, NEVER), ("fp8", 1, ALWAYS), ("int4", 1, NEVER)],
)
def test_experts_with_many_rows_agree_with_the_reference(
    tmp_path: Path,
    shm_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    fmt: LinearFormat,
    shards: int,
    quantize_from: int,
) -> None:
    """More than 64 rows each: they are expanded before, unless activations are E4M3."""
    expand, expanded = kernels.expand, []

    def counted(stack: ExpertStack) -> ExpertStack:
        expanded.append(stack)
        return expand(stack)

    monkeypatch.setattr(kernels, "expand", counted)
    with tiny_weights(tmp_path, shm_prefix, "mixtral", fmt, shards) as (spec, weights):
        tokens = prompt(spec, NUM_BLOCKS * BLOCK_TOKENS, 5)
        ffn = spec.layers[0].ffn
        assert isinstance(ffn, MoeFfnSpec)
        copies = 1 + 64 * ffn.num_experts // (len(tokens) * ffn.experts_per_token)
        # All at the same places: what one writes the others write, too.
        chunk = SequenceChunk(tokens, 0, list(range(NUM_BLOCKS)))
        batch = Batch.build([chunk] * copies, BLOCK_TOKENS)
        reference = Transformer(spec, weights)
        model = _model(spec, weights, quantize_from=quantize_from)
        hidden = reference.embed(batch.token_ids)
        for layer in range(2):
            ours = model.forward_layer(layer, hidden.clone(), batch, pages_of(spec))
            hidden = reference.forward_layer(layer, hidden, batch, pages_of(spec))
            assert _error(ours, hidden) < BARS[quantize_from]
    assert (len(expanded) > 0) == (quantize_from == NEVER)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_moe"])
def test_how_a_prompt_is_cut_and_packed_changes_little(
    tmp_path: Path, shm_prefix: str, architecture: str
) -> None:
    """In two sweeps, the second over a cached prefix; one token alone; rings of any length."""
    with tiny_weights(tmp_path, shm_prefix, architecture, "bf16") as (spec, weights):
        tokens = prompt(spec, 61, 1)
        model = _model(spec, weights)
        pages = pages_of(spec)
        whole = run(model, pages, SequenceChunk(tokens, 0, BLOCKS))
        for slots in (2, 100):
            other = _model(spec, weights, expert_slots=slots)
            assert torch.equal(run(other, pages_of(spec), SequenceChunk(tokens, 0, BLOCKS)), whole)
            assert torch.equal(run(other, pages_of(spec), SequenceChunk(tokens, 0, BLOCKS)), whole)
        first = SequenceChunk(tokens[:33], 0, BLOCKS)
        second = SequenceChunk(tokens[33:60], 33, BLOCKS)
        cut = pages_of(spec)
        run(model, cut, first)
        assert _error(run(model, cut, second), whole[33:60], 0.5) < 2e-2
        last = run(model, cut, SequenceChunk(tokens[60:], 60, BLOCKS))
        assert last.shape == (1, spec.hidden_size)
        is_mla = spec.kv.kind is KvKind.MLA
        kv = [written(p, BLOCKS, 61, is_mla)[0] for p in (cut, pages)]
        assert relative_error(*kv) < 3e-3


def test_a_sweep_that_is_broken_off_leaves_nothing_behind(tmp_path: Path, shm_prefix: str) -> None:
    """After three of four layers another prompt comes: its result is as if nothing had been."""
    with tiny_weights(tmp_path, shm_prefix, "deepseek_v3", "fp8") as (spec, weights):
        chunk = SequenceChunk(prompt(spec, 20, 3), 0, BLOCKS)
        expected = run(_model(spec, weights), pages_of(spec), chunk)
        model, pages = _model(spec, weights), pages_of(spec)
        other = Batch.build([SequenceChunk(prompt(spec, 11, 4), 0, [1, 2, 3])], BLOCK_TOKENS)
        hidden = model.embed(other.token_ids)
        for layer in range(3):
            hidden = model.forward_layer(layer, hidden, other, pages)
        assert torch.equal(run(model, pages, chunk), expected)
        assert pages.layers[3][[1, 2, 3]].isnan().all()


def test_logits_are_the_reference_s(tmp_path: Path, shm_prefix: str) -> None:
    with tiny_weights(tmp_path, shm_prefix, "deepseek_v3", "fp8") as (spec, weights):
        hidden = torch.randn(3, spec.hidden_size)
        with exact_activations():
            expected = Transformer(spec, weights).logits(hidden)
        # FP16 has 11 bits; BF16, with 8, would be at 1.7e-3.
        assert relative_error(_model(spec, weights).logits(hidden), expected) < 4e-4
