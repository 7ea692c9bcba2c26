"""From the GPU to the CPU's experts and back, by flags in mapped memory (Triton).

Owns the order of writes. Inputs are written and made visible to the whole system by each thread
that wrote them; the program that comes last then writes the ticket. A single warp waits for the
answer's ticket, for many would keep the bus and the flag's cache line busy; the kernel after it
reads the outputs past all caches.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.gpu.mailbox import Lane

_COLUMNS = 1024
_LAYER_BITS = 16


@triton.jit
def _write_through(value):
    """Waits until what this thread wrote before is visible to the whole system."""
    return tl.inline_asm_elementwise(
        "membar.sys; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
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
    num_programs,
    width,
    num_choices,
    layer_bits: tl.constexpr,
    columns: tl.constexpr,
    choices: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    place = token * width + column
    is_there = column < width
    tl.store(host_x + place, tl.load(x + place, mask=is_there, other=0.0), mask=is_there)
    if tl.program_id(1) == 0:
        choice = tl.arange(0, choices)
        slot = token * num_choices + choice
        mask = choice < num_choices
        chosen = tl.load(experts + slot, mask=mask, other=0).to(tl.int32)
        tl.store(host_experts + slot, chosen, mask=mask)
        tl.store(host_weights + slot, tl.load(weights + slot, mask=mask, other=0.0), mask=mask)
    _write_through(column)
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1) == num_programs - 1:
        tl.store(arrivals, 0)
        number = tl.load(count) + 1
        tl.store(count, number)
        tl.store(posted, (number << layer_bits) | layer)


@triton.jit(do_not_specialize=["layer"])
def _await(count, done, layer, layer_bits: tl.constexpr):
    ticket = (tl.load(count) << layer_bits) | layer
    found = tl.load(done, volatile=True)
    while found != ticket:
        found = tl.load(done, volatile=True)


@triton.jit
def _add_answer(hidden, output, width, columns: tl.constexpr):
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    place = tl.program_id(0) * width + column
    is_there = column < width
    term = tl.load(output + place, mask=is_there, other=0.0, volatile=True)
    total = tl.load(hidden + place, mask=is_there, other=0.0) + term
    tl.store(hidden + place, total, mask=is_there)


def post(lane: Lane, layer: int, x: Tensor, experts: Tensor, weights: Tensor) -> None:
    """Asks for `layer` of FP32 x [T, hidden], integer experts and FP32 weights [T, k]."""
    num_tokens, width = x.shape
    grid = (num_tokens, triton.cdiv(width, _COLUMNS))
    _post[grid](
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
        grid[0] * grid[1],
        width,
        experts.shape[1],
        _LAYER_BITS,
        _COLUMNS,
        triton.next_power_of_2(experts.shape[1]),
        num_warps=4,
    )


def add_answer(lane: Lane, layer: int, hidden: Tensor) -> None:
    """Waits for `layer`'s answer, and adds it to FP32 hidden [T, hidden]."""
    num_tokens, width = hidden.shape
    _await[(1,)](lane.count, lane.done, layer, _LAYER_BITS, num_warps=1)
    grid = (num_tokens, triton.cdiv(width, _COLUMNS))
    _add_answer[grid](hidden, lane.output, width, _COLUMNS, num_warps=4)
