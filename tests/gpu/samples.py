"""Random expert stacks in every format, and how far apart two results are."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.gpu.kernels.experts import FP8_BLOCK, ExpertStack, Format

INT4_GROUP = 32


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """L2 of the difference over L2 of `theirs`, in FP64; NaN where either has one."""
    difference = (ours.double() - theirs.double()).norm()
    return float(difference / theirs.double().norm())


def random_parts(
    fmt: Format,
    experts: int,
    shards: int,
    intermediate: int,
    hidden: int,
    generator: torch.Generator,
    *,
    has_zeros: bool = False,
) -> dict[str, Tensor]:
    """Tensors named as in a weights segment; outputs keep about the size of inputs."""
    stack = (experts, shards) if shards > 1 else (experts,)
    size = intermediate // shards
    parts = _matrix("gate_up", fmt, (*stack, 2, size, hidden), generator, has_zeros)
    return parts | _matrix("down", fmt, (*stack, hidden, size), generator, has_zeros)


def random_stack(
    fmt: Format,
    experts: int,
    shards: int,
    intermediate: int,
    hidden: int,
    generator: torch.Generator,
    *,
    has_zeros: bool = False,
) -> ExpertStack:
    """The same as a stack."""
    return ExpertStack.of(
        random_parts(fmt, experts, shards, intermediate, hidden, generator, has_zeros=has_zeros)
    )


def _matrix(
    name: str, fmt: Format, shape: tuple[int, ...], generator: torch.Generator, has_zeros: bool
) -> dict[str, Tensor]:
    *stack, rows, columns = shape
    spread = columns**-0.5
    if fmt in ("bf16", "fp16"):
        dtype = torch.bfloat16 if fmt == "bf16" else torch.float16
        return {name: (torch.randn(shape, generator=generator) * spread).to(dtype)}
    if fmt == "fp8":
        values = (torch.randn(shape, generator=generator) * 60).clamp(-448, 448)
        blocks = (*stack, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        scale = (torch.rand(blocks, generator=generator) + 0.5) * spread / 60
        return {name: values.to(torch.float8_e4m3fn), f"{name}.scale": scale}
    codes = torch.randint(256, (*stack, rows, columns // 2), generator=generator).byte()
    groups = (*stack, rows, columns // INT4_GROUP)
    if fmt == "mxfp4":
        exponents = torch.randint(121, 126, groups, generator=generator).byte()
        return {name: codes, f"{name}.scale": exponents}
    scale = (torch.rand(groups, generator=generator) + 0.5) * spread / 4
    parts = {name: codes, f"{name}.scale": scale.bfloat16()}
    if has_zeros:
        parts[f"{name}.zero"] = torch.randint(16, groups, generator=generator).byte()
    return parts
