"""What a linear weight consists of in each format: the tensors, their names, shapes and dtypes.

Owns both sides: names in checkpoints and in the segment. Reads no file.

Published forms: FP8 in blocks (DeepSeek), compressed-tensors pack-quantized, AWQ (gemm) and GPTQ.
MXFP4 is stored as two bytes tensors, `weight_packed` [N, K/2] with the even column in the low half
of a byte, and `weight_scale` [N, K/32], whose byte e stands for 2^(e - 127).
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.model.layer_spec import FP8_BLOCK, MXFP4_GROUP, LinearFormat, QuantSpec
from headwater.weights.tensors import DType, Encoding


@dataclass(frozen=True, slots=True)
class StoredField:
    """One of the tensors that make up a linear weight [N, K].

    `ours` follows the canonical name, `theirs` the module's path. Its shape is the weight's, each
    side divided by `rows` and `columns` (of the weight per element), rounded up.
    """

    ours: str
    theirs: str
    dtypes: tuple[DType, ...]
    encodings: tuple[Encoding, ...] = ()
    rows: int = 1
    columns: int = 1

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The field's shape for a weight of [rows, columns]."""
        return -(-rows // self.rows), -(-columns // self.columns)


_BF16 = (StoredField("", ".weight", (DType.BF16,), (Encoding.F16_TO_BF16,)),)
_FP8 = (
    StoredField("", ".weight", (DType.F8_E4M3,)),
    StoredField(".scale", ".weight_scale_inv", (DType.F32,), rows=FP8_BLOCK, columns=FP8_BLOCK),
)
_MXFP4 = (
    StoredField("", ".weight_packed", (DType.U8,), columns=2),
    StoredField(".scale", ".weight_scale", (DType.U8,), columns=MXFP4_GROUP),
)


def stored_fields(quant: QuantSpec, linear_format: LinearFormat) -> tuple[StoredField, ...]:
    """The fields of a weight of `linear_format`: the values first, then scales, then zeros."""
    if linear_format == "bf16":
        return _BF16
    if linear_format == "fp8":
        return _FP8
    if linear_format == "mxfp4":
        return _MXFP4
    codes, scales, zeros = _int4_fields(quant)
    return (codes, scales, zeros) if quant.has_zeros else (codes, scales)


def row_multiple(quant: QuantSpec) -> int:
    """What the rows of a quantised weight must be a multiple of."""
    return 1 if quant.packing == "rows" else 8


def _int4_fields(quant: QuantSpec) -> tuple[StoredField, StoredField, StoredField]:
    group = quant.group
    if quant.packing == "rows":
        return (
            StoredField("", ".weight_packed", (), (Encoding.WORDS,), columns=2),
            StoredField(
                ".scale",
                ".weight_scale",
                (DType.BF16, DType.F32),
                (Encoding.F16_TO_F32,),
                columns=group,
            ),
            StoredField(
                ".zero", ".weight_zero_point", (), (Encoding.ROW_PACKED_ZEROS,), columns=group
            ),
        )
    codes, zeros = {
        "awq": (Encoding.AWQ_CODES, Encoding.AWQ_ZEROS),
        "gptq": (Encoding.GPTQ_CODES, Encoding.GPTQ_ZEROS),
        "gptq_v2": (Encoding.GPTQ_CODES, Encoding.GPTQ_V2_ZEROS),
    }[quant.packing]
    scales = (Encoding.TRANSPOSED_BF16, Encoding.TRANSPOSED_F16)
    return (
        StoredField("", ".qweight", (), (codes,), columns=2),
        StoredField(".scale", ".scales", (), scales, columns=group),
        StoredField(".zero", ".qzeros", (), (zeros,), columns=group),
    )
