"""Matrix: tensors of a checkpoint, seen as a weight matrix in one of the kernels' formats."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater import _native
from headwater._native import Format, ScaleType
from headwater.errors import InternalError
from headwater.kernels.checks import check_layout, check_tensor

FP8_BLOCK = 128
MXFP4_GROUP = 32
INT4_GROUPS = (32, 64, 128)


class Matrix:
    """One matrix [rows, columns], or several of the same shape in a contiguous stack [..., N, K].

    Made by the class methods, from tensors whose leading dimensions are the stack's; keeps the
    tensors alive. `native` is the stack's first member.
    """

    def __init__(
        self,
        native: _native.Matrix,
        stack: tuple[int, ...],
        tensors: tuple[Tensor, ...],
    ) -> None:
        self.native = native
        self.stack = stack
        self._tensors = tensors

    @property
    def rows(self) -> int:
        """Rows of one member."""
        return self.native.rows

    @property
    def columns(self) -> int:
        """Columns of one member."""
        return self.native.columns

    @classmethod
    def bf16(cls, weight: Tensor) -> Matrix:
        """BF16 [..., N, K]."""
        return _make(cls, Format.BF16, weight, torch.bfloat16, 2)

    @classmethod
    def fp8(cls, weight: Tensor, scale: Tensor) -> Matrix:
        """E4M3 [..., N, K] with FP32 scales [..., ceil(N/128), ceil(K/128)]."""
        *stack, rows, columns = weight.shape
        blocks = -(-columns // FP8_BLOCK)
        check_tensor("scale", scale, torch.float32, (*stack, -(-rows // FP8_BLOCK), blocks))
        return _make(cls, Format.FP8, weight, torch.float8_e4m3fn, 1, scale=scale, group=FP8_BLOCK)

    @classmethod
    def int4(cls, weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Matrix:
        """Groups of 4-bit integers, packed along K.

        `weight` is INT32 [..., N, K/8] or UINT8 [..., N, K/2], low nibble first; `scale` is BF16 or
        FP32 [..., N, K/group] with groups of 32, 64 or 128; `zero`, when values are not centred on
        8, is UINT8 [..., N, K/group], or INT32 [..., N, K/group/8] packed like the weights, which
        is unpacked here.
        """
        if weight.dtype == torch.int32:
            weight = weight.view(torch.uint8)
        *stack, rows, _ = weight.shape
        columns = weight.shape[-1] * 2
        groups = scale.shape[-1]
        group = columns // groups if groups else 0
        if group not in INT4_GROUPS or columns % group:
            raise InternalError(
                f"scale: expected one per 32, 64 or 128 of {columns} columns, got {groups}"
            )
        if scale.dtype not in (torch.float32, torch.bfloat16):
            raise InternalError(f"scale: expected FP32 or BF16, got {scale.dtype}")
        check_tensor("scale", scale, scale.dtype, (*stack, rows, groups))
        if zero is not None:
            if zero.dtype == torch.int32:
                zero = _unpack_nibbles(zero)[..., :groups].contiguous()
            check_tensor("zero", zero, torch.uint8, (*stack, rows, groups))
        return _make(
            cls, Format.INT4, weight, torch.uint8, 0.5, scale=scale, group=group, zero=zero
        )

    @classmethod
    def mxfp4(cls, weight: Tensor, scale: Tensor) -> Matrix:
        """E2M1 nibbles, UINT8 [..., N, K/2], with E8M0 scales, UINT8 [..., N, K/32]."""
        *stack, rows, packed = weight.shape
        check_tensor("scale", scale, torch.uint8, (*stack, rows, packed * 2 // MXFP4_GROUP))
        if packed * 2 % MXFP4_GROUP:
            raise InternalError(f"weight: {packed * 2} columns are not a multiple of 32")
        return _make(cls, Format.MXFP4, weight, torch.uint8, 0.5, scale=scale, group=MXFP4_GROUP)


_SCALE_TYPES = {
    torch.float32: ScaleType.F32,
    torch.bfloat16: ScaleType.BF16,
    torch.uint8: ScaleType.E8M0,
}


def _make(
    cls: type[Matrix],
    format_: Format,
    weight: Tensor,
    dtype: torch.dtype,
    bytes_per_column: float,
    *,
    scale: Tensor | None = None,
    group: int = 0,
    zero: Tensor | None = None,
) -> Matrix:
    if weight.dtype != dtype or weight.dim() < 2:
        raise InternalError(
            f"weight: expected {dtype} with two dimensions or more, "
            f"got {weight.dtype} of shape {list(weight.shape)}"
        )
    check_layout("weight", weight)
    *stack, rows, packed = weight.shape
    row_bytes = packed * weight.element_size()
    native = _native.Matrix(
        format=format_,
        scale_type=ScaleType.NONE if scale is None else _SCALE_TYPES[scale.dtype],
        rows=rows,
        columns=int(row_bytes / bytes_per_column),
        group=group,
        data=weight.data_ptr(),
        row_bytes=row_bytes,
        scales=0 if scale is None else scale.data_ptr(),
        scale_row_bytes=0 if scale is None else scale.shape[-1] * scale.element_size(),
        zeros=0 if zero is None else zero.data_ptr(),
        zero_row_bytes=0 if zero is None else zero.shape[-1],
    )
    kept = tuple(tensor for tensor in (weight, scale, zero) if tensor is not None)
    return cls(native, tuple(stack), kept)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """INT32 [..., n] -> UINT8 [..., 8 n], low nibble first."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
