"""The choice between one batch and two micro-batches."""

from __future__ import annotations

import random

import pytest

from headwater.gpu.dual_batch import DualBatchPolicy, micro_batches
from headwater.gpu.hybrid_decoder import MicroBatch


def _run(policy: DualBatchPolicy, steps: int, merged: float, dual: float, seed: int) -> float:
    """Total seconds of steps that take so long, give or take a tenth."""
    noise, total = random.Random(seed), 0.0
    for _ in range(steps):
        is_dual = policy.is_dual(4, 256)
        seconds = (dual if is_dual else merged) * noise.uniform(0.95, 1.05)
        policy.observe(4, 256, seconds, is_dual=is_dual)
        total += seconds
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("merged", "dual"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.5), (1.5, 1.0)])
def test_close_to_the_better_of_both_ways(merged: float, dual: float, seed: int) -> None:
    best = 1000 * min(merged, dual)
    assert _run(DualBatchPolicy(), 1000, merged, dual, seed) < 1.03 * best


@pytest.mark.parametrize(("dual", "trials"), [(0.5, 2), (2.0, 2), (0.95, 3)])
def test_a_clear_difference_needs_fewer_trials(dual: float, trials: int) -> None:
    policy, ways = DualBatchPolicy(), []
    for _ in range(20):
        ways.append(policy.is_dual(4, 256))
        policy.observe(4, 256, dual if ways[-1] else 1.0, is_dual=ways[-1])
    assert (ways.count(False) if dual < 1 else ways.count(True)) == trials


def test_changes_its_mind_when_times_change() -> None:
    policy = DualBatchPolicy()
    _run(policy, 100, 1.0, 2.0, 1)
    assert not policy.is_dual(4, 256)
    _run(policy, 4000, 3.0, 2.0, 2)
    assert policy.is_dual(4, 256)
    assert policy.speedups[4, 256] == pytest.approx(1.5, rel=0.1)


def test_kinds_of_steps_are_apart_and_one_row_is_never_split() -> None:
    policy = DualBatchPolicy()
    _run(policy, 50, 2.0, 1.0, 3)
    assert policy.is_dual(4, 256)
    assert not policy.is_dual(4, 512)
    assert not policy.is_dual(1, 256)


def test_micro_batches_cover_all_rows() -> None:
    assert micro_batches(5, is_dual=False) == [MicroBatch(0, 0, 5)]
    assert micro_batches(5, is_dual=True) == [MicroBatch(0, 0, 3), MicroBatch(1, 3, 2)]
