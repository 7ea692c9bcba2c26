"""What a pass over the weights takes, measured: a part for the pass and a part for each token.

Owns the fit; when passes happen and what is made of their costs is the engines' and the router's
business.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a measurement still counts for after one more.
_DECAY = 0.9
# Passes of nearly equal size say nothing about how the time is split: below this share of the mean
# size, as standard deviation, the known split is kept and scaled.
_MIN_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class PassCosts:
    """seconds = passes * seconds_per_pass + tokens * seconds_per_token.

    `max_tokens_per_pass` says how many passes a prompt takes.
    """

    seconds_per_pass: float = 0.0
    seconds_per_token: float = 0.0
    measured_passes: int = 0
    max_tokens_per_pass: int = 1

    def seconds(self, num_tokens: int) -> float:
        """Time for so many tokens in as few passes as possible; zero for none."""
        passes = -(-num_tokens // self.max_tokens_per_pass)
        return passes * self.seconds_per_pass + num_tokens * self.seconds_per_token


class CostMeter:
    """Fits PassCosts to what was measured, the newest counting most.

    A line through weighted points, by least squares; neither part is ever negative. One thread
    observes, any may read `costs`.
    """

    def __init__(self, max_tokens_per_pass: int) -> None:
        self.costs = PassCosts(max_tokens_per_pass=max_tokens_per_pass)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Notes that a pass of `num_tokens`, at least one, took `seconds`."""
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + num_tokens
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + num_tokens * num_tokens
        self._xy = self._xy * _DECAY + num_tokens * seconds
        per_pass, per_token = self._split()
        self.costs = PassCosts(
            per_pass, per_token, self.costs.measured_passes + 1, self.costs.max_tokens_per_pass
        )

    def _split(self) -> tuple[float, float]:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if variance <= (_MIN_SPREAD * mean_x) ** 2:
            return self._scaled(mean_x, mean_y)
        per_token = (self._xy / self._weight - mean_x * mean_y) / variance
        per_pass = mean_y - per_token * mean_x
        if per_token < 0.0:
            return mean_y, 0.0
        if per_pass < 0.0:
            return 0.0, self._xy / self._xx
        return per_pass, per_token

    def _scaled(self, mean_x: float, mean_y: float) -> tuple[float, float]:
        """The split known so far, made to give `mean_y` at `mean_x`."""
        known = self.costs
        expected = known.seconds_per_pass + known.seconds_per_token * mean_x
        if expected <= 0.0:
            return 0.0, mean_y / mean_x
        scale = mean_y / expected
        return known.seconds_per_pass * scale, known.seconds_per_token * scale
