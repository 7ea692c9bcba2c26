"""Products of activations with whole matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater import _native
from headwater._native import Mode
from headwater.errors import InternalError
from headwater.kernels.checks import check_tensor, rows_of
from headwater.kernels.matrix import Matrix
from headwater.kernels.pool import WorkerPool


def linear(
    pool: WorkerPool,
    matrices: Matrix | Sequence[Matrix],
    x: Tensor,
    outs: Tensor | Sequence[Tensor],
    *,
    mode: Mode = Mode.DECODE,
    isa: str | None = None,
) -> None:
    """out = x times the transposed matrix, for one or several matrices of equally many columns.

    `x` is FP32 [T, columns] and is rounded to BF16 on the way; each of `outs` is FP32 [T, rows] and
    is overwritten. `isa` overrides the process's instruction set. Raises InternalError on tensors
    that do not fit.
    """
    matrices = [matrices] if isinstance(matrices, Matrix) else matrices
    outs = [outs] if isinstance(outs, Tensor) else outs
    if not matrices or len(matrices) != len(outs):
        raise InternalError(f"outs: expected one per matrix, got {len(outs)} for {len(matrices)}")
    num_tokens = rows_of("x", x)
    parts = []
    for matrix, out in zip(matrices, outs, strict=True):
        if matrix.stack:
            raise InternalError(f"matrix: expected a single one, got a stack of {matrix.stack}")
        check_tensor("x", x, torch.float32, (num_tokens, matrix.columns))
        check_tensor("out", out, torch.float32, (num_tokens, matrix.rows))
        parts.append((matrix.native, out.data_ptr()))
    _native.linear(pool.native, isa or "", parts, x.data_ptr(), num_tokens, mode)
