"""What a pass over the weights takes, measured: a part for the pass and a part for its size.

Owns the fit; when passes happen and what is made of their costs is the engines' and the router's
business.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a measurement still counts for after one more.
_DECAY = 0.9
# A point may be this many times what was expected; more, such as a moment when the machine did
# something else, only counts for so much. A lasting change is followed all the same.
_MAX_JUMP = 3.0
_MIN_POINTS_TO_EXPECT = 4
# Points whose two sizes nearly keep one ratio say nothing about how the time is split: below this
# share, as the squared sine of the angle they span, the known split is kept and scaled.
_MIN_ANGLE = 0.01


class TwoPartFit:
    """seconds = a * first + b * second, by least squares over points, the newest counting most.

    Neither part is ever negative. As long as the sizes' ratio stays, all goes with the second. One
    thread observes; any may read `parts` or call `seconds`.
    """

    def __init__(self) -> None:
        self.parts = (0.0, 0.0)
        self.num_points = 0
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0

    def observe(self, first: float, second: float, seconds: float) -> None:
        """Notes that a piece of work of these sizes, both above zero, took `seconds`."""
        if self.num_points >= _MIN_POINTS_TO_EXPECT:
            seconds = min(seconds, _MAX_JUMP * self.seconds(first, second))
        self._uu = self._uu * _DECAY + first * first
        self._uv = self._uv * _DECAY + first * second
        self._vv = self._vv * _DECAY + second * second
        self._uy = self._uy * _DECAY + first * seconds
        self._vy = self._vy * _DECAY + second * seconds
        self.parts = self._fitted()
        self.num_points += 1

    def seconds(self, first: float, second: float) -> float:
        """What work of these sizes would take; zero when nothing is known."""
        a, b = self.parts
        return a * first + b * second

    def _fitted(self) -> tuple[float, float]:
        determinant = self._uu * self._vv - self._uv**2
        if determinant <= _MIN_ANGLE * self._uu * self._vv:
            return self._scaled()
        a = (self._uy * self._vv - self._vy * self._uv) / determinant
        b = (self._vy * self._uu - self._uy * self._uv) / determinant
        if b < 0.0:
            return self._uy / self._uu, 0.0
        if a < 0.0:
            return 0.0, self._vy / self._vv
        return a, b

    def _scaled(self) -> tuple[float, float]:
        """The split known so far, made to fit the points best."""
        a, b = self.parts
        power = a * a * self._uu + 2 * a * b * self._uv + b * b * self._vv
        if power <= 0.0:
            return 0.0, self._vy / self._vv
        scale = (a * self._uy + b * self._vy) / power
        return a * scale, b * scale


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
    """Measures PassCosts. One thread observes; any may read `costs`."""

    def __init__(self, max_tokens_per_pass: int) -> None:
        self.max_tokens_per_pass = max_tokens_per_pass
        self._fit = TwoPartFit()

    @property
    def costs(self) -> PassCosts:
        """As measured so far."""
        return PassCosts(*self._fit.parts, self._fit.num_points, self.max_tokens_per_pass)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Notes that a pass of `num_tokens`, at least one, took `seconds`."""
        self._fit.observe(1.0, num_tokens, seconds)
