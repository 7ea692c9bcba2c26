"""The gate of a decode step, its choice, and the ticket that asks the CPU for the experts (Triton).

Owns the choice: sigmoid or softmax scores, the best groups, the best experts. One program writes a
token's inputs for the CPU while others score; whichever is last chooses, and whichever chooses last
posts the ticket, so that no kernel has to be started in between. What is computed is what
headwater.model.gate says in torch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headwater.gpu.kernels.handover import LAYER_BITS, store_release
from headwater.gpu.kernels.pieces import rms_norm
from headwater.gpu.lane import MOST_PREDICTED

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.gpu.lane import Lane
    from headwater.gpu.resident import Norm, ResidentGate

# Tokens up to which scores are sums of this kernel's own; for more, a library reads the gate once.
_FEW_TOKENS = MOST_PREDICTED
# FP32 elements of the gate in a program's registers, and programs wanted at once.
_TILE, _PROGRAMS = 1 << 14, 128
# Experts that all are compared with at a time.
_CHUNK = 32


@triton.jit
def _rank(values, row, count: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr):
    """How many of the `count` numbers at `row` are before each of `values`; of equals, the lower.

    All comparisons at once: to find one largest after the other takes several times as long.
    """
    place = tl.arange(0, block)
    before = tl.zeros((block,), dtype=tl.int32)
    for first in tl.static_range(0, block, chunk):
        other = first + tl.arange(0, chunk)
        found = tl.load(row + other, mask=other < count, other=float("-inf"), cache_modifier=".cg")[
            None, :
        ]
        is_before = (found > values[:, None]) | (
            (found == values[:, None]) & (other[None, :] < place[:, None])
        )
        before += tl.sum(is_before.to(tl.int32), axis=1)
    return before


@triton.jit
def _choose_for(
    token,
    logits,
    bias,
    experts,
    weights,
    scale,
    num_experts: tl.constexpr,
    choices: tl.constexpr,
    groups: tl.constexpr,
    open_groups: tl.constexpr,
    is_normalized: tl.constexpr,
    block: tl.constexpr,
    group_block: tl.constexpr,
    size_block: tl.constexpr,
    chunk: tl.constexpr,
):
    """Experts INT32 and weights FP32 of one token, from its logits, which are overwritten."""
    low = float("-inf")
    row = logits + token * num_experts
    expert = tl.arange(0, block)
    mask = expert < num_experts
    # Others have written them; a multiprocessor's own cache may be older.
    found = tl.load(row + expert, mask=mask, other=low, cache_modifier=".cg")
    if bias is None:
        scores = tl.exp(found - tl.max(found, axis=0))
        scores = scores / tl.sum(scores, axis=0)
        ranking = found
    else:
        scores = 1.0 / (1.0 + tl.exp(-found))
        ranking = scores + tl.load(bias + expert, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(row + expert, ranking, mask=mask)
        tl.debug_barrier()
    if open_groups < groups:
        size: tl.constexpr = num_experts // groups
        group, member = tl.arange(0, group_block), tl.arange(0, size_block)
        at = group[:, None] * size + member[None, :]
        is_there = (group < groups)[:, None] & (member < size)[None, :]
        ours = tl.load(row + at, mask=is_there, other=low, cache_modifier=".cg")
        # A group counts by the sum of its two best.
        others = tl.where(member[None, :] == tl.argmax(ours, axis=1)[:, None], low, ours)
        worth = tl.max(ours, axis=1) + tl.max(others, axis=1)
        left = tl.where(group < groups, worth, low)
        is_open = tl.zeros((group_block,), dtype=tl.int32)
        for _ in tl.static_range(open_groups):
            is_best = group == tl.argmax(left, axis=0)
            is_open = tl.where(is_best, 1, is_open)
            left = tl.where(is_best, low, left)
        ours = tl.where((is_open == 1)[:, None], ours, low)
        tl.debug_barrier()
        tl.store(row + at, ours, mask=is_there)
        tl.debug_barrier()
        ranking = tl.load(row + expert, mask=mask, other=low, cache_modifier=".cg")
    place = _rank(ranking, row, num_experts, block, chunk)
    is_chosen = mask & (place < choices)
    if is_normalized:
        scores = scores / (tl.sum(tl.where(is_chosen, scores, 0.0), axis=0) + 1e-20)
    target = token * choices + place
    tl.store(experts + target, expert, mask=is_chosen)
    if weights is not None:
        tl.store(weights + target, scores * scale, mask=is_chosen)


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _gate(
    normal,
    norm,
    gate,
    logits,
    bias,
    posted_x,
    experts,
    weights,
    arrivals,
    count,
    posted,
    layer,
    scale,
    eps,
    num_tokens,
    is_alone: tl.constexpr,
    width: tl.constexpr,
    num_experts: tl.constexpr,
    choices: tl.constexpr,
    groups: tl.constexpr,
    open_groups: tl.constexpr,
    is_normalized: tl.constexpr,
    layer_bits: tl.constexpr,
    experts_each: tl.constexpr,
    width_block: tl.constexpr,
    block: tl.constexpr,
    group_block: tl.constexpr,
    size_block: tl.constexpr,
    chunk: tl.constexpr,
):
    token = tl.program_id(1)
    if posted is not None:
        # Nobody changes it before the last program does, which then need not wait for it.
        number = tl.load(count, volatile=True) + 1
    column = tl.arange(0, width_block)
    is_column = column < width
    x = tl.load(normal + token * width + column, mask=is_column, other=0.0)
    if norm is not None:
        x = rms_norm(x, tl.load(norm + column, mask=is_column, other=0.0), eps, width)
    if tl.program_id(0) == 0:
        if posted_x is not None:
            # Besides, so that nobody waits for it.
            tl.store(posted_x + token * width + column, x, mask=is_column)
    elif gate is not None:
        expert = (tl.program_id(0) - 1) * experts_each + tl.arange(0, experts_each)
        mask = (expert < num_experts)[:, None] & is_column[None, :]
        own = tl.load(gate + expert[:, None] * width + column[None, :], mask=mask, other=0.0)
        found = tl.sum(own * x[None, :], axis=1)
        tl.store(logits + token * num_experts + expert, found, mask=expert < num_experts)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + 1 + token, 1) == tl.num_programs(0) - 1:
        tl.store(arrivals + 1 + token, 0)
        _choose_for(
            token, logits, bias, experts, weights, scale, num_experts, choices, groups,
            open_groups, is_normalized, block, group_block, size_block, chunk,
        )  # fmt: skip
        tl.debug_barrier()
        is_last = True
        if not is_alone:
            is_last = tl.atomic_add(arrivals, 1) == num_tokens - 1
        if is_last:
            if not is_alone:
                tl.store(arrivals, 0)
            if posted is not None:
                store_release(posted.to(tl.int64), (number << layer_bits) | layer)
                # A prediction leaves the number to its question.
                if weights is not None:
                    tl.store(count, number)


def choose(
    gate: ResidentGate, normal: Tensor, lane: Lane, layer: int, *, is_posted: bool = True
) -> None:
    """Asks the lane's CPU for `layer`: FP32 normal [T, hidden], and each token's experts.

    What is not posted is written, but nobody is asked for it.
    """
    target = (lane.x, lane.experts, lane.weights)
    posted = lane.posted if is_posted else None
    _launch(gate, normal, None, lane, target, posted, layer)


def predict(
    gate: ResidentGate,
    hidden: Tensor,
    norm: Norm,
    lane: Lane,
    layer: int,
    *,
    is_posted: bool = True,
) -> None:
    """Tells the lane's CPU what FP32 hidden [T, hidden] would choose, T <= MOST_PREDICTED."""
    target = (None, lane.predictions, None)
    predicted = lane.predicted if is_posted else None
    _launch(gate, hidden, norm, lane, target, predicted, layer)


def _launch(
    gate: ResidentGate,
    x: Tensor,
    norm: Norm | None,
    lane: Lane,
    target: tuple[Tensor | None, Tensor, Tensor | None],
    ticket: Tensor | None,
    layer: int,
) -> None:
    """Inputs, experts and weights of x [T, hidden], normed if there is a norm, go to `target`, the
    lane's next ticket to `ticket`; with a norm T <= _FEW_TOKENS."""
    spec = gate.spec
    num_tokens, width = x.shape
    is_few = num_tokens <= _FEW_TOKENS
    width_block, num_experts = triton.next_power_of_2(width), spec.num_experts
    block = max(16, triton.next_power_of_2(num_experts))
    each = max(1, min(_TILE // width_block, triton.next_power_of_2(num_experts // _PROGRAMS)))
    if is_few:
        logits = torch.empty(num_tokens, num_experts, device=x.device)
    else:
        logits = torch.mm(x, gate.weight.t())
    _gate[(1 + triton.cdiv(num_experts, each) if is_few else 1, num_tokens)](
        x,
        None if norm is None else norm.weight,
        gate.weight if is_few else None,
        logits,
        gate.bias,
        *target,
        lane.arrivals,
        None if ticket is None else lane.count,
        ticket,
        layer,
        spec.routed_scale,
        0.0 if norm is None else norm.eps,
        num_tokens,
        num_tokens == 1,
        width,
        num_experts,
        spec.experts_per_token,
        spec.num_groups,
        spec.groups_per_token,
        spec.is_normalized,
        LAYER_BITS,
        each,
        width_block,
        block,
        triton.next_power_of_2(spec.num_groups),
        triton.next_power_of_2(max(16, num_experts // spec.num_groups)),
        min(_CHUNK, block),
        num_warps=8,
    )
