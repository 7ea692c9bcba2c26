"""From the GPU to the CPU's experts and back, by flags in mapped memory (Triton).

Owns the order of writes. For a single token no kernel is there for the hand-over alone: the gate's
programs write the inputs and the choice, and the last of them the ticket (gating.py), with release
at the scope of the whole system (PTX ISA, memory consistency model: such a store covers what the
thread has seen of others, so that one fence does for all). The next layer's norm looks for the
answer: one thread polls, with acquire. With several tokens a kernel of one warp waits for it, as
programs that wait keep others, of the other lane, from their multiprocessors.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headwater.gpu.kernels.pieces import rms_norm, sum_of_pieces
from headwater.gpu.precision import ROUNDED

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.gpu.lane import Lane
    from headwater.gpu.resident import Norm

LAYER_BITS = 16


@triton.jit
def store_release(address, value):
    """The first thread stores a 64-bit value after all that it has seen."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 is_first, thread, 0;
            @is_first st.release.sys.global.u64 [$1], $2;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,l",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait_acquire(address, value):
    """The first thread looks until a 64-bit value is there."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_other;
            .reg .b32 thread;
            .reg .b64 found;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_other, thread, 0;
            @is_other bra FOUND;
        LOOK:
            ld.acquire.sys.global.u64 found, [$1];
            setp.ne.u64 is_other, found, $2;
            @is_other bra LOOK;
        FOUND:
            mov.b32 $0, 0;
        }
        """,
        "=r,l,l",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _add_and_norm(
    hidden,
    partial,
    answer,
    count,
    done,
    layer,
    weight,
    normal,
    rounded,
    eps,
    num_tokens,
    width: tl.constexpr,
    pieces: tl.constexpr,
    layer_bits: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    place = token * width + column
    x = tl.load(hidden + place, mask=mask, other=0.0)
    if pieces > 0:
        x += sum_of_pieces(partial, token, num_tokens, 0, width, column, mask, pieces)
    scale = 0.0
    if weight is not None:
        scale = tl.load(weight + column, mask=mask, other=0.0)
    if answer is not None:
        if done is not None:
            _wait_acquire(done.to(tl.int64), (tl.load(count) << layer_bits) | layer)
            tl.debug_barrier()
        x += tl.load(answer + place, mask=mask, other=0.0, volatile=True)
    tl.store(hidden + place, x, mask=mask)
    if weight is not None:
        y = rms_norm(x, scale, eps, width)
        if normal is not None:
            tl.store(normal + place, y, mask=mask)
        tl.store(rounded + place, y.to(rounded.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _wait(count, done, layer, layer_bits: tl.constexpr):
    _wait_acquire(done.to(tl.int64), (tl.load(count) << layer_bits) | layer)


def add_and_norm(
    hidden: Tensor,
    partial: Tensor | None,
    answer: tuple[Lane, int] | None,
    norm: Norm | None,
    *,
    is_kept: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """hidden += the sum of partial's pieces and, once it is there, the lane's answer of a layer.

    `hidden` is FP32 [T, N], `partial` FP32 [pieces, T, N] or None. Gives hidden's norm in FP32, if
    it is kept, and in FP16; nothing without a norm.
    """
    num_tokens, width = hidden.shape
    normal = torch.empty_like(hidden) if is_kept else None
    rounded = None if norm is None else torch.empty_like(hidden, dtype=ROUNDED)
    lane, layer = answer or (None, 0)
    is_alone = num_tokens == 1
    if lane is not None and not is_alone:
        _wait[(1,)](lane.count, lane.done, layer, LAYER_BITS, num_warps=1)
    _add_and_norm[(num_tokens,)](
        hidden,
        partial,
        None if lane is None else lane.output,
        lane.count if lane is not None and is_alone else None,
        lane.done if lane is not None and is_alone else None,
        layer,
        None if norm is None else norm.weight,
        normal,
        rounded,
        0.0 if norm is None else norm.eps,
        num_tokens,
        width,
        0 if partial is None else partial.shape[0],
        LAYER_BITS,
        triton.next_power_of_2(width),
        num_warps=16,
    )
    return normal, rounded
