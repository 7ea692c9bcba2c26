"""Random matrices in every format, and their exact values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headwater.kernels import Matrix, Mode, WorkerPool, linear

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Sample:
    """A matrix, or a stack of them, and the same in FP64."""

    matrix: Matrix
    values: Tensor


def unaligned(tensor: Tensor, offset: int) -> Tensor:
    """A copy whose address is `offset` elements past a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + offset + 64, dtype=tensor.dtype)
    lead = -room.data_ptr() % 64 // room.element_size()
    start = lead + offset
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def expand_blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    """[..., ceil(rows/128), ceil(columns/128)] to one scale per element."""
    spread = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return spread[..., :rows, :columns]


def bf16(rng: torch.Generator, *shape: int) -> Sample:
    weight = torch.randn(shape, generator=rng).bfloat16()
    return Sample(Matrix.bf16(unaligned(weight, 3)), weight.double())


def fp8(rng: torch.Generator, *shape: int) -> Sample:
    """Every finite code occurs where the matrix has room for it."""
    count = torch.Size(shape).numel()
    codes = torch.randperm(count, generator=rng).remainder(256).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 1
    weight = codes.view(shape).view(torch.float8_e4m3fn)
    *stack, rows, columns = shape
    scale = torch.rand(*stack, -(-rows // 128), -(-columns // 128), generator=rng) + 0.01
    values = weight.double() * expand_blocks(scale, rows, columns)
    return Sample(Matrix.fp8(unaligned(weight, 5), unaligned(scale, 1)), values)


def unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def int4(group: int, scale_type: torch.dtype, has_zeros: bool) -> Callable[..., Sample]:
    def make(rng: torch.Generator, *shape: int) -> Sample:
        *lead, columns = shape
        columns = -(-columns // group) * group
        packed = torch.randint(0, 256, (*lead, columns // 2), generator=rng, dtype=torch.uint8)
        groups = (*lead, columns // group)
        scale = (torch.rand(groups, generator=rng) + 0.01).to(scale_type)
        zero = torch.randint(0, 16, groups, generator=rng, dtype=torch.uint8)
        offset = zero if has_zeros else torch.full_like(zero, 8)
        integers = unpack(packed).double() - offset.double().repeat_interleave(group, -1)
        values = integers * scale.double().repeat_interleave(group, -1)
        kept_zero = unaligned(zero, 1) if has_zeros else None
        return Sample(Matrix.int4(unaligned(packed, 7), unaligned(scale, 1), kept_zero), values)

    return make


def mxfp4(rng: torch.Generator, *shape: int) -> Sample:
    *lead, columns = shape
    columns = -(-columns // 32) * 32
    packed = torch.randint(0, 256, (*lead, columns // 2), generator=rng, dtype=torch.uint8)
    scale = torch.randint(115, 130, (*lead, columns // 32), generator=rng, dtype=torch.uint8)
    powers = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    values = E2M1.double()[unpack(packed).long()] * powers
    return Sample(Matrix.mxfp4(unaligned(packed, 9), unaligned(scale, 3)), values)


FORMATS: dict[str, Callable[..., Sample]] = {
    "bf16": bf16,
    "fp8": fp8,
    "int4-32-bf16": int4(32, torch.bfloat16, False),
    "int4-64-f32": int4(64, torch.float32, False),
    "int4-128-bf16": int4(128, torch.bfloat16, False),
    "int4-32-f32-zeros": int4(32, torch.float32, True),
    "int4-128-bf16-zeros": int4(128, torch.bfloat16, True),
    "mxfp4": mxfp4,
}


def seeded(request: pytest.FixtureRequest) -> tuple[torch.Generator, random.Random]:
    """Generators of a seed that differs per test and is printed when the test fails."""
    seed = sum(map(ord, request.node.name)) * 7919
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed), random.Random(seed)


def any_sample(name: str, rng: torch.Generator, choose: random.Random) -> Sample:
    """A matrix of any size up to 300 x 487; its rows end anywhere where the format has it so."""
    rows, columns = choose.randint(1, 300), 8 * choose.randint(1, 60)
    if name in ("bf16", "fp8"):
        columns += choose.randint(0, 7)
    return FORMATS[name](rng, rows, columns)


def rounded(x: Tensor) -> Tensor:
    """What the kernels compute with: rounded to BF16, in FP64."""
    return x.bfloat16().double()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


def product(
    pool: WorkerPool, sample: Sample, x: Tensor, isa: str, mode: Mode = Mode.DECODE
) -> Tensor:
    """x times the sample's matrix."""
    out = torch.full((x.shape[0], sample.matrix.rows), torch.nan)
    linear(pool, sample.matrix, x, out, isa=isa, mode=mode)
    return out
