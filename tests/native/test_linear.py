"""Products of every format, on every instruction set of this machine, against FP64."""

from __future__ import annotations

import pytest
import torch

from headwater.errors import ConfigError, InternalError
from headwater.kernels import Matrix, Mode, WorkerPool, linear, self_test, supported_isas
from tests.native.samples import (
    FORMATS,
    Sample,
    any_sample,
    product,
    relative_error,
    rounded,
    seeded,
)

ISAS = supported_isas()
# FP32 sums against FP64; the scalar kernels sum up in FP64.
TOLERANCE = {"scalar": 1e-7}
VECTOR_TOLERANCE = 2e-6


@pytest.mark.parametrize("isa", ISAS)
def test_self_test_passes(isa: str) -> None:
    self_test(isa)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_random_shapes_and_tails(
    pool: WorkerPool, name: str, isa: str, mode: Mode, request: pytest.FixtureRequest
) -> None:
    rng, choose = seeded(request)
    for _ in range(4):
        sample = any_sample(name, rng, choose)
        num_tokens = choose.choice([1, 2, 3, 4, 5, 8, 9, 21, 40])
        x = torch.randn(num_tokens, sample.matrix.columns, generator=rng)
        expected = rounded(x) @ sample.values.T
        error = relative_error(product(pool, sample, x, isa, mode), expected)
        shape = (sample.matrix.rows, sample.matrix.columns, num_tokens)
        assert error < TOLERANCE.get(isa, VECTOR_TOLERANCE), shape


@pytest.mark.parametrize("isa", ISAS)
def test_every_fp8_code_is_exact(pool: WorkerPool, isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    weight = codes.view(torch.float8_e4m3fn)
    matrix = Matrix.fp8(torch.diag(weight.float()).to(torch.float8_e4m3fn), torch.ones(2, 2))
    out = torch.empty(1, 254)
    linear(pool, matrix, torch.ones(1, 254), out, isa=isa)
    assert torch.equal(out[0], weight.float())


@pytest.mark.parametrize("isa", ISAS)
def test_every_nibble_is_exact(pool: WorkerPool, isa: str) -> None:
    """Row r holds code r in column 2r + 1 and a zero elsewhere."""
    int4 = torch.full((16, 32), 0x88, dtype=torch.uint8)
    e2m1 = torch.zeros((16, 32), dtype=torch.uint8)
    for row in range(16):
        int4[row, row] = 0x08 | row << 4
        e2m1[row, row] = row << 4
    out = torch.empty(1, 16)
    linear(pool, Matrix.int4(int4, torch.ones(16, 2)), torch.ones(1, 64), out, isa=isa)
    assert out[0].tolist() == [code - 8 for code in range(16)]
    ones = torch.full((16, 2), 127, dtype=torch.uint8)
    linear(pool, Matrix.mxfp4(e2m1, ones), torch.ones(1, 64), out, isa=isa)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert out[0].tolist() == magnitudes + [-value for value in magnitudes]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_extreme_scales(pool: WorkerPool, isa: str, scale: float) -> None:
    rng = torch.Generator().manual_seed(5)
    weight = torch.randn(20, 200, generator=rng).to(torch.float8_e4m3fn)
    matrix = Matrix.fp8(weight, torch.full((1, 2), scale))
    x = torch.randn(3, 200, generator=rng)
    expected = rounded(x) @ (weight.double() * torch.tensor(scale).double()).T
    got = product(pool, Sample(matrix, expected), x, isa)
    if scale == 0.0:
        assert torch.equal(got, torch.zeros_like(got))
    else:
        assert relative_error(got, expected) < VECTOR_TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_mxfp4_exponents(pool: WorkerPool, isa: str) -> None:
    """Code 0 means 2^-127, which FP32 holds as a subnormal; code 254 means 2^127."""
    weight = torch.full((4, 16), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[0], [1], [127], [254]], dtype=torch.uint8)
    out = torch.empty(1, 4)
    x = torch.zeros(1, 32)
    x[0, 3] = 1.0
    linear(pool, Matrix.mxfp4(weight, scale), x, out, isa=isa)
    assert out[0].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


@pytest.mark.parametrize("isa", ISAS)
def test_every_group_of_mxfp4_has_its_own_exponent(pool: WorkerPool, isa: str) -> None:
    """Zeros among them, at each place of a block and in the last, ragged one."""
    groups = 37
    rng = torch.Generator().manual_seed(5)
    codes = torch.tensor([0, 0, 1, 126, 127, 128, 253], dtype=torch.uint8)
    scale = codes[torch.randint(len(codes), (8, groups), generator=rng)]
    weight = torch.full((8, 16 * groups), 0x22, dtype=torch.uint8)
    x = torch.zeros(groups, 32 * groups)
    x[torch.arange(groups), 32 * torch.arange(groups) + 5] = 1.0
    out = torch.empty(groups, 8)
    for first in range(groups):
        linear(pool, Matrix.mxfp4(weight, scale), x[first:], out[first:], isa=isa)
        expected = torch.exp2(scale.double() - 127).T.float()
        assert torch.equal(out[first:], expected[first:])


@pytest.mark.parametrize("isa", ISAS)
def test_activations_round_to_even(pool: WorkerPool, isa: str) -> None:
    # Between 1 and the next BF16, 1 + 2^-7: just below, at, and just above the middle; the middle
    # above an odd neighbour.
    x = torch.tensor([[1 + 2**-8 - 2**-20, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8]])
    out = torch.empty(1, 4)
    linear(pool, Matrix.bf16(torch.eye(4).bfloat16()), x, out, isa=isa)
    assert torch.equal(out, x.bfloat16().float())
    assert out[0].tolist() == [1, 1, 1 + 2**-7, 1 + 2**-6]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_token_depends_neither_on_batch_nor_threads(
    pool: WorkerPool, name: str, isa: str, mode: Mode, request: pytest.FixtureRequest
) -> None:
    rng, _ = seeded(request)
    rows, num_tokens = (20, 11) if isa == "scalar" else (150, 43)
    sample = FORMATS[name](rng, rows, 424)
    x = torch.randn(num_tokens, sample.matrix.columns, generator=rng)
    alone = WorkerPool(1)
    together = product(pool, sample, x, isa, mode)
    assert torch.equal(product(alone, sample, x, isa, mode), together)
    for first, last in ((0, 1), (3, 5), (2, 9), (1, num_tokens)):
        part = product(alone, sample, x[first:last], isa, mode)
        assert torch.equal(part, together[first:last]), (first, last)


@pytest.mark.parametrize("isa", ISAS)
def test_several_matrices_share_tokens(
    pool: WorkerPool, isa: str, request: pytest.FixtureRequest
) -> None:
    rng, _ = seeded(request)
    samples = [FORMATS[name](rng, rows, 256) for rows, name in enumerate(FORMATS, start=30)]
    x = torch.randn(6, 256, generator=rng)
    outs = [torch.empty(6, sample.matrix.rows) for sample in samples]
    linear(pool, [sample.matrix for sample in samples], x, outs, isa=isa)
    for sample, out in zip(samples, outs, strict=True):
        assert torch.equal(out, product(pool, sample, x, isa))


def test_packed_int4_as_in_checkpoints(pool: WorkerPool) -> None:
    """compressed-tensors' order: eight values per INT32, the first in the lowest bits."""
    rng = torch.Generator().manual_seed(8)
    values = torch.randint(0, 16, (24, 64), generator=rng)
    zeros = torch.randint(0, 16, (24, 8), generator=rng)
    shifts = torch.arange(0, 32, 4)

    def pack(integers: torch.Tensor) -> torch.Tensor:
        words = (integers.view(24, -1, 8) << shifts).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).int()

    scale = torch.rand(24, 2, generator=rng)
    matrix = Matrix.int4(pack(values), scale, pack(zeros))
    x = torch.randn(2, 64, generator=rng)
    expected = (
        rounded(x)
        @ ((values - zeros[:, :2].repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1))
        .double()
        .T
    )
    out = torch.empty(2, 24)
    linear(pool, matrix, x, out)
    assert relative_error(out, expected) < VECTOR_TOLERANCE


def test_unfit_tensors_are_refused(pool: WorkerPool) -> None:
    matrix = Matrix.bf16(torch.zeros(4, 8).bfloat16())
    with pytest.raises(InternalError, match=r"x: expected torch.float32 of shape \[2, 8\]"):
        linear(pool, matrix, torch.zeros(2, 7), torch.zeros(2, 4))
    with pytest.raises(InternalError, match="out: expected a contiguous tensor"):
        linear(pool, matrix, torch.zeros(2, 8), torch.zeros(4, 2).T)
    with pytest.raises(InternalError, match="weight: expected torch.bfloat16"):
        Matrix.bf16(torch.zeros(4, 8))
    with pytest.raises(InternalError, match="scale: expected"):
        Matrix.fp8(torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.ones(1, 2))
    with pytest.raises(ConfigError, match="not supported by this CPU"):
        linear(pool, matrix, torch.zeros(2, 8), torch.zeros(2, 4), isa="sse9")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_modes_and_batches_agree_bit_for_bit(
    pool: WorkerPool, name: str, isa: str, request: pytest.FixtureRequest
) -> None:
    """So a prompt has the same KV whoever computes it, and however many tokens at once."""
    rng, choose = seeded(request)
    rows, columns = choose.randint(1, 200), choose.randint(1, 900)
    sample = FORMATS[name](rng, rows, columns)
    x = torch.randn(40, columns, generator=rng)
    alone = torch.cat([product(pool, sample, x[i : i + 1].clone(), isa) for i in range(len(x))])
    for mode in Mode:
        for num_tokens in (2, 7, 16, 17, 32, 33, 40):
            together = product(pool, sample, x[:num_tokens].clone(), isa, mode)
            assert torch.equal(together, alone[:num_tokens]), (rows, columns, mode, num_tokens)
