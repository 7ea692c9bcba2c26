"""The routed experts of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater import _native
from headwater._native import Activation, Mode
from headwater.errors import InternalError
from headwater.kernels.checks import check_tensor, rows_of
from headwater.kernels.matrix import Matrix
from headwater.kernels.pool import WorkerPool


class MoeLayer:
    """Weighted sum of the chosen experts' outputs.

    `gate_up` is a stack [experts, 2] of [intermediate, hidden], gate before up; `down` a stack
    [experts] of [hidden, intermediate]. With `num_shards` above 1 the intermediate dimension is cut
    into that many parts, whose sums are added in order. `limit` belongs to
    Activation.CLAMPED_SWIGLU. Raises ConfigError or InternalError on parts that do not fit.
    """

    def __init__(
        self,
        pool: WorkerPool,
        gate_up: Matrix,
        down: Matrix,
        *,
        experts_per_token: int,
        num_shards: int = 1,
        activation: Activation = Activation.SILU,
        limit: float = 0.0,
        isa: str | None = None,
    ) -> None:
        if len(gate_up.stack) != 2 or gate_up.stack[1] != 2 or down.stack != gate_up.stack[:1]:
            raise InternalError(
                f"experts: expected stacks [experts, 2] and [experts], "
                f"got {list(gate_up.stack)} and {list(down.stack)}"
            )
        self._parts = (pool, gate_up, down)
        self._hidden = gate_up.columns
        self._experts_per_token = experts_per_token
        self._native = _native.MoeLayer(
            pool.native,
            isa or "",
            gate_up.native,
            down.native,
            gate_up.stack[0],
            num_shards,
            experts_per_token,
            activation,
            limit,
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes of weights, scales and zeros of one expert."""
        return self._native.expert_bytes

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, out: Tensor, mode: Mode = Mode.DECODE
    ) -> None:
        """Overwrites `out`, FP32 [T, hidden].

        `x` is FP32 [T, hidden] and is rounded to BF16 on the way (in DECODE on AMX, FP8 and at
        least 16 times as many experts as a token chooses: to FP16); `experts` is INT32 and
        `weights` FP32, both [T, experts_per_token]. A token's result depends neither on the other
        tokens nor on the number of threads. Raises InternalError on tensors that do not fit.
        """
        num_tokens = rows_of("x", x)
        choices = (num_tokens, self._experts_per_token)
        check_tensor("x", x, torch.float32, (num_tokens, self._hidden))
        check_tensor("experts", experts, torch.int32, choices)
        check_tensor("weights", weights, torch.float32, choices)
        check_tensor("out", out, torch.float32, (num_tokens, self._hidden))
        self._native.run(
            x.data_ptr(), experts.data_ptr(), weights.data_ptr(), out.data_ptr(), num_tokens, mode
        )
