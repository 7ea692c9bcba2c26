"""The routed experts' layer on every instruction set, against FP64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headwater.errors import ConfigError, InternalError
from headwater.kernels import Activation, Matrix, Mode, MoeLayer, WorkerPool, supported_isas
from tests.native.samples import FORMATS, Sample, relative_error, rounded, seeded

ISAS = supported_isas()
# The bar of the project; nearly all of it is the rounding of the hidden layer to BF16.
TOLERANCE = 4e-3


@dataclass(frozen=True)
class Experts:
    gate_up: Sample
    down: Sample

    @property
    def hidden(self) -> int:
        return self.gate_up.matrix.columns


def make_experts(
    rng: torch.Generator, name: str, num_experts: int, hidden: int, intermediate: int
) -> Experts:
    make = FORMATS[name]
    return Experts(
        make(rng, num_experts, 2, intermediate, hidden),
        make(rng, num_experts, hidden, intermediate),
    )


def choose_experts(rng: torch.Generator, tokens: int, experts: int, top: int) -> Tensor:
    picks = [torch.randperm(experts, generator=rng)[:top] for _ in range(tokens)]
    return torch.stack(picks).int()


def reference(
    experts: Experts, x: Tensor, ids: Tensor, weights: Tensor, limit: float | None = None
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(rounded(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gate = experts.gate_up.values[expert, 0] @ row
            up = experts.gate_up.values[expert, 1] @ row
            if limit is None:
                hidden = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out[token] += weight * (experts.down.values[expert] @ hidden)
    return out


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "fp8", "int4-32-bf16", "int4-128-bf16-zeros", "mxfp4"])
def test_layer_matches_fp64(
    name: str, isa: str, num_shards: int, request: pytest.FixtureRequest
) -> None:
    rng, _ = seeded(request)
    hidden = {"bf16": 135, "fp8": 135, "int4-128-bf16-zeros": 256}.get(name, 160)
    experts = make_experts(rng, name, 5, hidden, 512)
    layer = MoeLayer(
        WorkerPool(3),
        experts.gate_up.matrix,
        experts.down.matrix,
        experts_per_token=3,
        num_shards=num_shards,
        isa=isa,
    )
    for num_tokens in (1, 3) if isa == "scalar" else (1, 4, 30):
        x = torch.randn(num_tokens, experts.hidden, generator=rng)
        ids = choose_experts(rng, num_tokens, 5, 3)
        weights = torch.rand(num_tokens, 3, generator=rng)
        expected = reference(experts, x, ids, weights)
        for mode in Mode:
            out = torch.full_like(x, torch.nan)
            layer(x, ids, weights, out, mode)
            assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "fp8", "int4-32-bf16", "mxfp4"])
def test_layer_of_many_experts(name: str, isa: str, request: pytest.FixtureRequest) -> None:
    """Where an expert has a token or two there are other products, of any number of tokens."""
    rng, _ = seeded(request)
    num_experts, top = 37, 2
    experts = make_experts(rng, name, num_experts, 160, 192)
    layer = MoeLayer(
        WorkerPool(3),
        experts.gate_up.matrix,
        experts.down.matrix,
        experts_per_token=top,
        isa=isa,
    )
    x = torch.randn(60, experts.hidden, generator=rng)
    ids = choose_experts(rng, len(x), num_experts, top)
    # Some have many tokens all the same.
    ids[::3] = torch.tensor([5, 30], dtype=torch.int32)
    weights = torch.rand(len(x), top, generator=rng)
    out, alone = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    layer(x, ids, weights, out, Mode.DECODE)
    assert relative_error(out, reference(experts, x, ids, weights)) < TOLERANCE
    for token in range(len(x)):
        one = slice(token, token + 1)
        layer(x[one], ids[one], weights[one], alone[one], Mode.DECODE)
    assert torch.equal(out, alone)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_deepseek_shape_in_fp8(isa: str, request: pytest.FixtureRequest) -> None:
    """Every dimension of DeepSeek-V3 but the number of experts, scales as in a checkpoint."""
    rng, _ = seeded(request)
    shapes = {"gate_up": (2, 2, 2048, 7168), "down": (2, 7168, 2048)}
    samples = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=rng).mul_(60).to(torch.float8_e4m3fn)
        blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
        scale = torch.rand(blocks, generator=rng).mul_(3e-4).add_(2e-4)
        samples[name] = (weight, scale)
    layer = MoeLayer(
        WorkerPool(2),
        Matrix.fp8(*samples["gate_up"]),
        Matrix.fp8(*samples["down"]),
        experts_per_token=2,
        isa=isa,
    )
    x = torch.randn(2, 7168, generator=rng)
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    out = torch.empty_like(x)
    layer(x, ids, weights, out)

    def values(name: str, *index: int) -> Tensor:
        weight, scale = samples[name]
        spread = scale[index].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight[index].double().mul_(spread)

    expected = torch.zeros(2, 7168, dtype=torch.float64)
    for expert in range(2):
        rows = rounded(x)
        gate, up = rows @ values("gate_up", expert, 0).T, rows @ values("gate_up", expert, 1).T
        hidden = torch.nn.functional.silu(gate) * up
        share = (weights * (ids == expert)).sum(1, keepdim=True).double()
        expected += share * (hidden @ values("down", expert).T)
    error = relative_error(out, expected)
    print(f"relative L2 error {error:.2e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
def test_clamped_activation(isa: str, request: pytest.FixtureRequest) -> None:
    rng, _ = seeded(request)
    experts = make_experts(rng, "mxfp4", 3, 64, 96)
    layer = MoeLayer(
        WorkerPool(1),
        experts.gate_up.matrix,
        experts.down.matrix,
        experts_per_token=2,
        activation=Activation.CLAMPED_SWIGLU,
        limit=7.0,
        isa=isa,
    )
    x = torch.randn(4, experts.hidden, generator=rng)
    ids = choose_experts(rng, 4, 3, 2)
    weights = torch.rand(4, 2, generator=rng)
    out = torch.empty_like(x)
    layer(x, ids, weights, out)
    assert relative_error(out, reference(experts, x, ids, weights, limit=7.0)) < TOLERANCE


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "fp8", "int4-32-f32-zeros", "mxfp4"])
def test_token_depends_neither_on_batch_nor_threads(
    name: str, isa: str, mode: Mode, num_shards: int, request: pytest.FixtureRequest
) -> None:
    rng, _ = seeded(request)
    experts = make_experts(rng, name, 4, 160, 256)
    num_tokens = 3 if isa == "scalar" else 25
    x = torch.randn(num_tokens, experts.hidden, generator=rng)
    ids = choose_experts(rng, num_tokens, 4, 2)
    weights = torch.rand(num_tokens, 2, generator=rng)
    outs = []
    for num_threads in (1, 2, 5):
        layer = MoeLayer(
            WorkerPool(num_threads),
            experts.gate_up.matrix,
            experts.down.matrix,
            experts_per_token=2,
            num_shards=num_shards,
            isa=isa,
        )
        out = torch.empty_like(x)
        layer(x, ids, weights, out, mode)
        outs.append(out)
        for first, last in ((0, 1), (1, 3), (2, num_tokens)):
            part = torch.empty_like(x[first:last])
            layer(x[first:last], ids[first:last], weights[first:last], part, mode)
            assert torch.equal(part, out[first:last]), (num_threads, first, last)
    assert all(torch.equal(outs[0], out) for out in outs)


def test_unfit_layers_are_refused() -> None:
    pool = WorkerPool(1)
    gate_up = Matrix.fp8(
        torch.zeros(2, 2, 192, 128).to(torch.float8_e4m3fn), torch.ones(2, 2, 2, 1)
    )
    down = Matrix.fp8(torch.zeros(2, 128, 192).to(torch.float8_e4m3fn), torch.ones(2, 1, 2))
    with pytest.raises(ConfigError, match="starts at a multiple of 128"):
        MoeLayer(pool, gate_up, down, experts_per_token=1, num_shards=2)
    with pytest.raises(ConfigError, match="cannot choose 3 of 2"):
        MoeLayer(pool, gate_up, down, experts_per_token=3)
    with pytest.raises(InternalError, match="expected stacks"):
        MoeLayer(pool, down, down, experts_per_token=1)
    layer = MoeLayer(pool, gate_up, down, experts_per_token=1)
    x, out = torch.zeros(1, 128), torch.zeros(1, 128)
    with pytest.raises(InternalError, match="2 chosen of 2"):
        layer(x, torch.tensor([[2]], dtype=torch.int32), torch.ones(1, 1), out)
