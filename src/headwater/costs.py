"""What a pass over the weights takes, measured: a part for the pass and a part for its size.

Owns the fit; when passes happen and what is made of their costs is the engines' and the router's
business.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEAN_WEIGHT = 0.2
# What a measurement still counts for after one more.
_DECAY = 0.9
# A point may be this many times what was expected; more, such as a moment when the machine did
# something else, only counts for so much. A lasting change is followed all the same.
_MAX_JUMP = 3.0
_MIN_POINTS_TO_EXPECT = 4
# Fewer tokens than this are never worth a pass of their own.
_MIN_PIECE_TOKENS = 16
# How much of the way to a new split is gone per point, once there is one: few points, all of them
# disturbed, can give any split.
_STEP_TO_NEW_SPLIT = 0.3
# Points whose two sizes nearly keep one ratio say nothing about how the time is split: below this
# share, as the squared sine of the angle they span, the known split is kept and scaled.
_MIN_ANGLE = 0.01


class FadingMean:
    """A mean in which the newest value has a fifth of the weight, or all of it if it is the first.

    A value counts for no more than a few times the mean: one that met a fault says little.
    """

    def __init__(self) -> None:
        self.value = 0.0

    def observe(self, value: float) -> None:
        """Takes a value of at least zero."""
        if self.value <= 0.0:
            self.value = value
        else:
            self.value += _MEAN_WEIGHT * (min(value, _MAX_JUMP * self.value) - self.value)


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
        fitted, scaled = self._fitted(), self._scaled()
        step = _STEP_TO_NEW_SPLIT if self.num_points >= _MIN_POINTS_TO_EXPECT else 1.0
        if fitted is None:
            step, fitted = 0.0, scaled
        a, b = (old + step * (new - old) for old, new in zip(scaled, fitted, strict=True))
        self.parts = (a, b)
        self.num_points += 1

    def seconds(self, first: float, second: float) -> float:
        """What work of these sizes would take; zero when nothing is known."""
        a, b = self.parts
        return a * first + b * second

    def _fitted(self) -> tuple[float, float] | None:
        """The best split, if the points tell one that makes sense."""
        determinant = self._uu * self._vv - self._uv**2
        if determinant <= _MIN_ANGLE * self._uu * self._vv:
            return None
        a = (self._uy * self._vv - self._vy * self._uv) / determinant
        b = (self._vy * self._uu - self._uy * self._uv) / determinant
        return (a, b) if min(a, b) >= 0.0 else None

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


def smallest_piece(costs: PassCosts) -> int:
    """Tokens that are worth a pass: so many that they take as long as the pass without them."""
    if costs.seconds_per_token <= 0.0:
        return costs.max_tokens_per_pass
    worth = int(costs.seconds_per_pass / costs.seconds_per_token)
    return min(costs.max_tokens_per_pass, max(_MIN_PIECE_TOKENS, worth))


def affordable_tokens(costs: PassCosts, seconds: float) -> int:
    """Tokens of one pass that takes so long; zero when there is not even time for the pass."""
    if seconds < costs.seconds_per_pass:
        return 0
    if costs.seconds_per_token <= 0.0:
        return costs.max_tokens_per_pass
    tokens = int((seconds - costs.seconds_per_pass) / costs.seconds_per_token)
    return min(tokens, costs.max_tokens_per_pass)


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
