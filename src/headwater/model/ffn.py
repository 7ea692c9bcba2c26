"""The dense gated feed-forward network; also the shared expert of a routed layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from headwater.model.linear import round_activations
from headwater.model.source import WeightSource


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded to BF16 for the product that follows; consumes its inputs."""
    return round_activations(functional.silu(gate).mul_(up))


class DenseFfn:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, source: WeightSource) -> None:
        self._gate = source.matrix("gate")
        self._up = source.matrix("up")
        self._down = source.matrix("down")

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised hidden states, FP32 [T, hidden] -> FP32 [T, hidden]."""
        x = round_activations(x)
        return self._down.matmul(gated(self._gate.matmul(x), self._up.matmul(x)))
