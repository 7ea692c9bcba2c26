"""Matrix: exact weights, whatever the format, the stacking and the raggedness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.model.linear import Matrix, Scratch, round_activations

SHAPES = [(1, 1), (128, 128), (129, 257), (300, 130), (3, 2, 200, 72), (4, 256, 384), (900, 700)]


def _fp8(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A random weight, its scales, and the FP32 values they stand for as [rows, columns]."""
    *leading, rows, columns = shape
    weight = torch.randn(shape).mul(40).to(torch.float8_e4m3fn)
    scale = torch.rand(*leading, -(-rows // 128), -(-columns // 128)) * 0.01
    expanded = scale.repeat_interleave(128, -1)[..., :columns]
    expanded = expanded.repeat_interleave(128, -2)[..., :rows, :]
    return weight, scale, (weight.float() * expanded).view(-1, columns)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_fp8_product(shape: tuple[int, ...], num_tokens: int) -> None:
    torch.manual_seed(len(shape) + num_tokens)
    weight, scale, exact = _fp8(shape)
    x = round_activations(torch.randn(num_tokens, shape[-1]))
    ours = Matrix(weight, scale, Scratch()).matmul(x)
    torch.testing.assert_close(ours, x @ exact.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unquantised_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    weight = torch.randn(shape).to(dtype)
    x = round_activations(torch.randn(3, shape[-1]))
    ours = Matrix(weight, None, Scratch()).matmul(x)
    exact = x @ weight.float().view(-1, shape[-1]).t()
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-4)


def test_every_finite_fp8_code_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(1, -1)
    weight = codes.view(torch.float8_e4m3fn)
    expanded = Matrix(weight, torch.ones(1, 2), Scratch()).expand(0, 1)
    assert torch.equal(expanded, weight.float())


@pytest.mark.parametrize("shape", [(1, 32), (3, 2, 40, 96), (900, 704)])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("scale_type", [torch.bfloat16, torch.float32])
def test_int4_product(shape: tuple[int, ...], has_zeros: bool, scale_type: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    *leading, columns = shape
    codes = torch.randint(16, shape, dtype=torch.uint8)
    scale = torch.rand(*leading, columns // 32).to(scale_type)
    zeros = torch.randint(16, scale.shape, dtype=torch.uint8) if has_zeros else None
    offset = 8 if zeros is None else zeros.int().repeat_interleave(32, -1)
    exact = (codes.int() - offset) * scale.float().repeat_interleave(32, -1)
    matrix = Matrix(codes[..., 0::2] + 16 * codes[..., 1::2], scale, Scratch(), zeros)
    x = round_activations(torch.randn(3, columns))
    torch.testing.assert_close(
        matrix.matmul(x), x @ exact.view(-1, columns).t(), rtol=1e-5, atol=1e-3
    )
    assert torch.equal(matrix.expand(0, 1), exact.view(-1, columns)[:1])


def test_every_mxfp4_code_and_scale_is_exact() -> None:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((magnitudes, -magnitudes, magnitudes, -magnitudes))
    low = torch.arange(0, 32, 2, dtype=torch.uint8) % 16
    packed = (low + 16 * (low + 1)).expand(255, 16).contiguous()
    exponents = torch.arange(255, dtype=torch.uint8).view(255, 1)
    expanded = Matrix(packed, exponents, Scratch()).expand(0, 255)
    exact = values.double() * 2.0 ** (exponents.double() - 127)
    assert torch.equal(expanded, exact.float())


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (100, 140), (127, 300), (128, 256)])
def test_expand_any_rows(start: int, stop: int) -> None:
    torch.manual_seed(start)
    weight, scale, exact = _fp8((300, 130))
    matrix = Matrix(weight, scale, Scratch())
    matrix.reserve_rows(stop - start)
    assert torch.equal(matrix.expand(start, stop), exact[start:stop])


def test_matrices_share_a_scratch_of_the_largest_size() -> None:
    torch.manual_seed(0)
    scratch = Scratch()
    small = Matrix(torch.randn(4, 8).bfloat16(), None, scratch)
    # 128 rows of these exceed the scratch that all models start with.
    large = torch.randn(130, 5000).bfloat16()
    x = round_activations(torch.randn(2, 5000))
    torch.testing.assert_close(Matrix(large, None, scratch).matmul(x), x @ large.float().t())
    assert small.matmul(torch.zeros(1, 8)).count_nonzero() == 0
