"""Native CPU kernels for linear layers and routed experts: their typed face.

Owns the checks of what goes into the kernels and the memory that they point to. Does not own the
model's layers (headwater.model), nor the kernels themselves (native/).
"""

from headwater._native import Activation, Mode
from headwater.kernels.linear import linear
from headwater.kernels.matrix import Matrix
from headwater.kernels.moe import MoeLayer
from headwater.kernels.pool import (
    WorkerPool,
    isa,
    self_test,
    set_exact_activations,
    supported_isas,
)

__all__ = [
    "Activation",
    "Matrix",
    "Mode",
    "MoeLayer",
    "WorkerPool",
    "isa",
    "linear",
    "self_test",
    "set_exact_activations",
    "supported_isas",
]
