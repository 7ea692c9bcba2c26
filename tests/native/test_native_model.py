"""NativeTransformer's promises that do not need a reference, and its gates against torch.

That it computes what transformers computes is in tests/golden, for every family and format.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater import _native
from headwater.errors import ConfigError, InternalError
from headwater.kernels import Mode, WorkerPool, supported_isas
from headwater.kernels.model import NativeTransformer
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.gate import Gate
from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.linear import Scratch
from headwater.model.source import WeightSource
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.weights.loader import load_weights
from headwater.weights.store import WeightsStore
from tests.exactly import exactly
from tests.nan_pages import nan_pages
from tests.native.samples import relative_error, seeded

BLOCK_TOKENS = 4
PROMPT = [3, 250, 17, 17, 99, 4, 8, 200, 31, 77, 5]
ISAS = supported_isas()


@pytest.fixture
def store(tiny_model: Path, shm_prefix: str) -> Iterator[WeightsStore]:
    store = load_weights(tiny_model, _spec(tiny_model).tensors(), shm_prefix=shm_prefix)
    with torch.inference_mode():
        yield store
    store.segment.unlink()
    store.close()


@pytest.fixture
def make(tiny_model: Path, store: WeightsStore) -> Callable[..., NativeTransformer]:
    def make(
        threads: int = 2, mode: Mode = Mode.DECODE, isa: str | None = None
    ) -> NativeTransformer:
        return NativeTransformer(_spec(tiny_model), store, WorkerPool(threads), mode=mode, isa=isa)

    return make


def _spec(folder: Path) -> ModelSpec:
    return ModelSpec.load(folder)


def _pages(spec: ModelSpec) -> KvPages:
    """Pages full of NaN: whatever is read without having been written shows."""
    return nan_pages(spec, num_blocks=12, block_tokens=BLOCK_TOKENS)


def _logits(model: NativeTransformer | Transformer, *chunks: SequenceChunk) -> Tensor:
    batch = Batch.build(chunks, BLOCK_TOKENS)
    return model.logits(model.forward(batch, _pages(model.spec)))


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.PREFILL])
@pytest.mark.parametrize("isa", ISAS)
def test_agrees_with_torch(
    make: Callable[..., NativeTransformer], store: WeightsStore, isa: str, mode: Mode
) -> None:
    """Up to rounding to BF16, which falls differently where sums differ in their last bits."""
    model = make(mode=mode, isa=isa)
    chunk = SequenceChunk(PROMPT, 0, [9, 3, 7])
    ours, theirs = _logits(model, chunk), _logits(Transformer(model.spec, store), chunk)
    assert torch.isfinite(ours).all()
    assert relative_error(ours, theirs) < 5e-3


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.PREFILL])
@pytest.mark.parametrize("isa", ISAS)
def test_exact_activations_are_those_of_torch_that_rounds_nothing(
    make: Callable[..., NativeTransformer], store: WeightsStore, isa: str, mode: Mode
) -> None:
    rounding = make(mode=mode, isa=isa)
    chunk = SequenceChunk(PROMPT, 0, [9, 3, 7])
    with exactly():
        exact = make(mode=mode, isa=isa)
        expected = _logits(Transformer(exact.spec, store), chunk)
    # What is left is an entry of the cache that falls to the other side here and there.
    assert relative_error(_logits(exact, chunk), expected) < 3e-4
    assert relative_error(_logits(rounding, chunk), expected) > 6e-4


def test_layer_by_layer_is_the_same_as_at_once(make: Callable[..., NativeTransformer]) -> None:
    model = make()
    batch = Batch.build([SequenceChunk(PROMPT, 0, [9, 3, 7])], BLOCK_TOKENS)
    at_once, by_layer = _pages(model.spec), _pages(model.spec)
    hidden = model.embed(batch.token_ids)
    before = hidden.clone()
    for layer in range(model.spec.num_layers):
        after = model.forward_layer(layer, hidden, batch, by_layer)
        assert torch.equal(hidden, before)
        hidden, before = after, after.clone()
    assert torch.equal(hidden, model.forward(batch, at_once))
    for ours, theirs in zip(by_layer.layers, at_once.layers, strict=True):
        assert torch.equal(ours[[9, 3]], theirs[[9, 3]])


@pytest.mark.parametrize("isa", ISAS)
def test_no_bit_depends_on_the_batch_or_the_threads(
    request: pytest.FixtureRequest, make: Callable[..., NativeTransformer], isa: str
) -> None:
    """A sequence alone on one thread, and among up to 40 others on up to 5."""
    _, choose = seeded(request)
    alone = _logits(make(1, isa=isa), SequenceChunk(PROMPT, 0, [0, 1, 2]))
    for threads in (1, 2, 5):
        model = make(threads, isa=isa)
        for count in (1, 7, 40):
            # All others share a block, which they may: nobody looks at what they give.
            others = [
                SequenceChunk([choose.randrange(256)] * choose.randint(1, 4), 0, [3])
                for _ in range(count)
            ]
            place = choose.randint(0, count)
            mine = SequenceChunk(PROMPT, 0, [0, 1, 2])
            logits = _logits(model, *others[:place], mine, *others[place:])
            first = sum(len(other.token_ids) for other in others[:place])
            assert torch.equal(logits[first : first + len(PROMPT)], alone)


def test_the_weights_stay_mapped_while_the_model_lives(tiny_model: Path, shm_prefix: str) -> None:
    spec = _spec(tiny_model)
    store = load_weights(tiny_model, spec.tensors(), shm_prefix=shm_prefix)
    model = NativeTransformer(spec, store, WorkerPool(2))
    chunk = SequenceChunk(PROMPT, 0, [0, 1, 2])
    before = _logits(model, chunk)
    store.segment.unlink()
    store.close()
    del store
    gc.collect()
    assert torch.equal(_logits(model, chunk), before)


def test_refuses_what_does_not_fit(make: Callable[..., NativeTransformer]) -> None:
    model = make()
    pages = _pages(model.spec)
    batch = Batch.build([SequenceChunk(PROMPT, 0, [0, 1, 2])], BLOCK_TOKENS)
    with pytest.raises(InternalError, match=r"hidden: expected torch.float32 of shape \[11, 64\]"):
        model.forward_layer(0, torch.zeros(11, 63), batch, pages)
    with pytest.raises(InternalError, match="token 258 is outside the vocabulary"):
        model.embed(torch.tensor([258]))
    with pytest.raises(InternalError, match="a block is not of the pool"):
        model.forward(Batch.build([SequenceChunk([1], 0, [12])], BLOCK_TOKENS), pages)
    with pytest.raises(InternalError, match="pages: expected FP16 with 16 elements last"):
        model.forward(batch, KvPages([p.float() for p in pages.layers], BLOCK_TOKENS))
    with pytest.raises(ConfigError, match="isa: 'mips' is not supported by this CPU"):
        make(isa="mips")


class _Weights(dict[str, Tensor]):
    def tensor(self, name: str) -> Tensor:
        return self[name]


def _choose(spec: MoeFfnSpec, weights: _Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    matrix, bias = weights["gate"], weights.get("gate.bias")
    gate = _native.Gate(
        matrix=_native.FloatMatrix.floats(spec.num_experts, x.shape[1], matrix.data_ptr()),
        bias=0 if bias is None else bias.data_ptr(),
        experts_per_token=spec.experts_per_token,
        num_groups=spec.num_groups,
        groups_per_token=spec.groups_per_token,
        is_normalized=spec.is_normalized,
        scale=spec.routed_scale,
    )
    pool = WorkerPool(2)
    compute = _native.Compute(pool.native, "", Mode.DECODE)
    experts = torch.empty(len(x), spec.experts_per_token, dtype=torch.int32)
    chosen = torch.empty(len(x), spec.experts_per_token)
    gate.choose(compute, x.data_ptr(), len(x), experts.data_ptr(), chosen.data_ptr())
    return experts, chosen


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid_bias_group"])
def test_gates_agree_with_torch(
    request: pytest.FixtureRequest, kind: str, is_normalized: bool, groups: tuple[int, int]
) -> None:
    rng, _ = seeded(request)
    is_sigmoid = kind == "sigmoid_bias_group"
    spec = MoeFfnSpec(
        num_experts=64,
        experts_per_token=6,
        intermediate_size=8,
        gate="sigmoid_bias_group" if is_sigmoid else "softmax",
        is_normalized=is_normalized,
        routed_scale=2.5,
        num_groups=groups[0] if is_sigmoid else 1,
        groups_per_token=groups[1] if is_sigmoid else 1,
    )
    weights = _Weights(gate=torch.randn(64, 96, generator=rng) / 10)
    if is_sigmoid:
        weights["gate.bias"] = torch.randn(64, generator=rng) / 10
    x = torch.randn(100, 96, generator=rng)
    expected, expected_weights = Gate(spec, WeightSource(weights, Scratch(), 1e-5))(x)
    experts, chosen = _choose(spec, weights, x)
    assert torch.equal(experts, expected.int())
    torch.testing.assert_close(chosen, expected_weights, rtol=1e-5, atol=0)


def test_of_equal_experts_the_lower_comes_first() -> None:
    spec = MoeFfnSpec(
        num_experts=8,
        experts_per_token=3,
        intermediate_size=8,
        gate="softmax",
        is_normalized=True,
    )
    experts, chosen = _choose(spec, _Weights(gate=torch.zeros(8, 16)), torch.ones(2, 16))
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(chosen, torch.full((2, 3), 1 / 3))
