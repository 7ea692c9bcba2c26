"""From the GPU to the CPU's experts and back, by flags in mapped memory (Triton).

Owns the order of writes. A program writes a token's inputs; the barrier orders them before the
ticket, which the program that comes last stores with release at the scope of the whole system (PTX
ISA, memory consistency model: such a store covers what the thread has seen of others, so that one
fence does for all). For the answer one thread of each program polls, with acquire: more would keep
the bus and the flag's cache line busy.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.gpu.mailbox import Lane

_LAYER_BITS = 16


@triton.jit
def _store_release(address, value):
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


@triton.jit(do_not_specialize=["layer"])
def _post(
    x,
    experts,
    weights,
    host_x,
    host_experts,
    host_weights,
    count,
    arrivals,
    posted,
    layer,
    width,
    num_tokens: tl.constexpr,
    num_choices: tl.constexpr,
    layer_bits: tl.constexpr,
    columns: tl.constexpr,
    choices: tl.constexpr,
):
    token = tl.program_id(0)
    number = tl.load(count, volatile=True) + 1
    column = tl.arange(0, columns)
    place = token * width + column
    is_there = column < width
    tl.store(host_x + place, tl.load(x + place, mask=is_there, other=0.0), mask=is_there)
    choice = tl.arange(0, choices)
    slot = token * num_choices + choice
    mask = choice < num_choices
    chosen = tl.load(experts + slot, mask=mask, other=0).to(tl.int32)
    tl.store(host_experts + slot, chosen, mask=mask)
    tl.store(host_weights + slot, tl.load(weights + slot, mask=mask, other=0.0), mask=mask)
    tl.debug_barrier()
    is_last = True
    if num_tokens > 1:
        is_last = tl.atomic_add(arrivals, 1) == num_tokens - 1
    if is_last:
        if num_tokens > 1:
            tl.store(arrivals, 0)
        tl.store(count, number)
        _store_release(posted.to(tl.int64), (number << layer_bits) | layer)


@triton.jit(do_not_specialize=["layer"])
def _add_answer(
    hidden, output, count, done, layer, width, layer_bits: tl.constexpr, columns: tl.constexpr
):
    column = tl.arange(0, columns)
    place = tl.program_id(0) * width + column
    is_there = column < width
    before = tl.load(hidden + place, mask=is_there, other=0.0)
    ticket = (tl.load(count) << layer_bits) | layer
    _wait_acquire(done.to(tl.int64), ticket)
    tl.debug_barrier()
    term = tl.load(output + place, mask=is_there, other=0.0, volatile=True)
    tl.store(hidden + place, before + term, mask=is_there)


def post(lane: Lane, layer: int, x: Tensor, experts: Tensor, weights: Tensor) -> None:
    """Asks for `layer` of FP32 x [T, hidden], integer experts and FP32 weights [T, k]."""
    num_tokens, width = x.shape
    _post[(num_tokens,)](
        x,
        experts,
        weights,
        lane.x,
        lane.experts,
        lane.weights,
        lane.count,
        lane.arrivals,
        lane.posted,
        layer,
        width,
        num_tokens,
        experts.shape[1],
        _LAYER_BITS,
        triton.next_power_of_2(width),
        triton.next_power_of_2(experts.shape[1]),
        num_warps=8,
    )


def add_answer(lane: Lane, layer: int, hidden: Tensor) -> None:
    """Waits for `layer`'s answer, and adds it to FP32 hidden [T, hidden]."""
    num_tokens, width = hidden.shape
    _add_answer[(num_tokens,)](
        hidden,
        lane.output,
        lane.count,
        lane.done,
        layer,
        width,
        _LAYER_BITS,
        triton.next_power_of_2(width),
        num_warps=8,
    )
