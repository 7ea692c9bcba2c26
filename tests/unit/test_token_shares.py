"""How a pass is shared among prompts, and the fit of what passes cost."""

from __future__ import annotations

import random

import pytest

from headwater.costs import CostMeter, FadingMean, PassCosts
from headwater.token_shares import share_tokens


@pytest.mark.parametrize(
    ("pending", "budget", "shares"),
    [
        ([], 8, []),
        ([3], 8, [3]),
        ([3, 2], 0, [0, 0]),
        ([100], 8, [8]),
        ([100], 1, [1]),
        # All that fit.
        ([3, 2, 1], 8, [3, 2, 1]),
        # A short one joins the pass of a long one, which takes the rest.
        ([100, 2], 8, [6, 2]),
        # Short ones get half of it together, the shortest first.
        ([100, 3, 2], 8, [4, 2, 2]),
        ([100, 50, 9], 8, [4, 0, 4]),
        ([100, 9, 9], 8, [4, 4, 0]),
        # What a short first one leaves is for the others.
        ([1, 100, 3], 8, [1, 4, 3]),
        # The first one goes on even in the smallest of passes.
        ([100, 1], 1, [1, 0]),
        ([100, 1], 3, [2, 1]),
    ],
)
def test_shares(pending: list[int], budget: int, shares: list[int]) -> None:
    assert share_tokens(pending, budget) == shares


def test_nobody_starves_and_no_pass_is_wasted() -> None:
    """Short prompts keep coming; the long ones, in the order of their arrival, still get on."""
    seed = 20261129
    rng = random.Random(seed)
    budget, pending = 16, [400, 300, 200]
    done: list[int] = []
    passes = 0
    waiting = list(range(3))
    while {0, 1, 2} - set(done):
        passes += 1
        waiting.append(len(pending))
        pending.append(rng.randint(1, 12))
        shares = share_tokens([pending[i] for i in waiting], budget)
        assert sum(shares) == min(budget, sum(pending[i] for i in waiting)), f"seed {seed}"
        for index, share in zip(waiting, shares, strict=True):
            pending[index] -= share
        done += [i for i in waiting if pending[i] == 0]
        waiting = [i for i in waiting if pending[i]]
    assert [i for i in done if i < 3] == [0, 1, 2]
    # Each long one has at least half of each pass while it is the first.
    assert passes <= 900 // (budget // 2) + 3


def test_costs_of_a_prompt() -> None:
    costs = PassCosts(2.0, 0.5, 1, max_tokens_per_pass=10)
    assert costs.seconds(0) == 0.0
    assert costs.seconds(10) == 7.0
    assert costs.seconds(11) == 9.5


def test_two_sizes_tell_pass_and_token_apart() -> None:
    meter = CostMeter(64)
    for size in (1, 64, 1, 64):
        meter.observe(size, 0.010 + 0.001 * size)
    assert meter.costs.seconds_per_pass == pytest.approx(0.010)
    assert meter.costs.seconds_per_token == pytest.approx(0.001)
    assert meter.costs.measured_passes == 4
    assert meter.costs.max_tokens_per_pass == 64


def test_equal_sizes_keep_the_split_and_follow_the_speed() -> None:
    meter = CostMeter(64)
    meter.observe(64, 0.064)
    assert meter.costs.seconds(64) == pytest.approx(0.064)
    for size in (1, 64, 1, 64):
        meter.observe(size, 0.010 + 0.001 * size)
    for _ in range(200):
        meter.observe(64, 2 * (0.010 + 0.001 * 64))
    assert meter.costs.seconds(64) == pytest.approx(0.148, rel=0.01)
    assert meter.costs.seconds_per_token > 0.0


def test_a_hiccup_counts_little_and_a_lasting_change_is_followed() -> None:
    meter = CostMeter(64)
    for size in (1, 64) * 8:
        meter.observe(size, 0.010 + 0.001 * size)
    meter.observe(64, 60.0)
    assert meter.costs.seconds(64) < 0.148
    for size in (1, 64) * 20:
        meter.observe(size, 10 * (0.010 + 0.001 * size))
    assert meter.costs.seconds(64) == pytest.approx(0.74, rel=0.05)


def test_a_mean_forgets_and_is_not_upset() -> None:
    mean = FadingMean()
    assert mean.value == 0.0
    mean.observe(10.0)
    assert mean.value == 10.0
    mean.observe(1000.0)
    assert mean.value == pytest.approx(14.0)
    for _ in range(40):
        mean.observe(1.0)
    assert mean.value == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("slope", [-0.001, 0.001])
def test_no_part_is_negative(slope: float) -> None:
    meter = CostMeter(64)
    for size in (16, 64, 16, 64):
        meter.observe(size, 0.1 + slope * size if slope < 0 else slope * (size - 8))
    assert meter.costs.seconds_per_pass >= 0.0
    assert meter.costs.seconds_per_token >= 0.0
    assert meter.costs.seconds(40) > 0.0
