"""Products of activations in two pieces, on every instruction set here, against FP64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headwater.kernels import (
    Mode,
    MoeLayer,
    WorkerPool,
    self_test,
    set_exact_activations,
    supported_isas,
)
from tests.exactly import exactly
from tests.native.samples import FORMATS, any_sample, product, relative_error, seeded

ISAS = supported_isas()
# 2^-17 of an activation may be lost, and FP32 sums lose 2e-6; rounding to BF16 alone loses 2e-3.
TOLERANCE = 8e-6


@pytest.fixture(autouse=True)
def in_two_pieces() -> Iterator[None]:
    with exactly():
        yield


@pytest.mark.parametrize("isa", ISAS)
def test_self_test_passes(isa: str) -> None:
    self_test(isa)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_random_shapes(
    pool: WorkerPool, name: str, isa: str, mode: Mode, request: pytest.FixtureRequest
) -> None:
    rng, choose = seeded(request)
    for num_tokens in (1, choose.randint(2, 9), choose.randint(10, 40)):
        sample = any_sample(name, rng, choose)
        x = torch.randn(num_tokens, sample.matrix.columns, generator=rng)
        found = product(pool, sample, x, isa, mode)
        shape = (sample.matrix.rows, sample.matrix.columns, num_tokens)
        assert relative_error(found, x.double() @ sample.values.T) < TOLERANCE, shape
        alone = product(pool, sample, x[-1:], isa, mode)
        assert torch.equal(found[-1:], alone), shape


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_more_rows_and_tokens_than_are_multiplied_at_once(
    pool: WorkerPool, isa: str, mode: Mode, request: pytest.FixtureRequest
) -> None:
    rng, _ = seeded(request)
    one = WorkerPool(1)
    sample = FORMATS["fp8"](rng, 1100, 136)
    x = torch.randn(300, 136, generator=rng)
    found = product(one, sample, x, isa, mode)
    assert relative_error(found, x.double() @ sample.values.T) < TOLERANCE
    assert torch.equal(found, product(pool, sample, x, isa, mode))


@pytest.mark.parametrize("isa", ISAS)
def test_experts(pool: WorkerPool, isa: str, request: pytest.FixtureRequest) -> None:
    rng, _ = seeded(request)
    experts, hidden, intermediate, tokens = 3, 64, 40, 5
    gate_up = FORMATS["bf16"](rng, experts, 2, intermediate, hidden)
    down = FORMATS["bf16"](rng, experts, hidden, intermediate)
    layer = MoeLayer(pool, gate_up.matrix, down.matrix, experts_per_token=1, isa=isa)
    chosen = torch.arange(tokens, dtype=torch.int32)[:, None] % experts
    x = torch.randn(tokens, hidden, generator=rng)
    expected = torch.stack(
        [
            down.values[e]
            @ (torch.nn.functional.silu(gate_up.values[e, 0] @ v) * (gate_up.values[e, 1] @ v))
            for e, v in zip(chosen[:, 0].tolist(), x.double(), strict=True)
        ]
    )
    out = torch.empty(tokens, hidden)
    layer(x, chosen, torch.ones(tokens, 1), out, Mode.DECODE)
    assert relative_error(out, expected) < TOLERANCE
    set_exact_activations(False)
    layer(x, chosen, torch.ones(tokens, 1), out, Mode.DECODE)
    assert relative_error(out, expected) < TOLERANCE, "a layer keeps what it was made with"
    rounding = MoeLayer(pool, gate_up.matrix, down.matrix, experts_per_token=1, isa=isa)
    rounding(x, chosen, torch.ones(tokens, 1), out, Mode.DECODE)
    assert relative_error(out, expected) > 100 * TOLERANCE
