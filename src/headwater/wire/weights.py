"""headwater.v1 weights messages to and from headwater.weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.errors import UnavailableError
from headwater.v1 import weights_pb2 as pb
from headwater.weights.tensors import DType, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_BATCH_TENSORS = 4096

_DTYPE_TO_PB = {
    DType.F32: pb.DTYPE_F32,
    DType.BF16: pb.DTYPE_BF16,
    DType.F8_E4M3: pb.DTYPE_F8_E4M3,
    DType.U8: pb.DTYPE_U8,
}
_DTYPE_FROM_PB = {value: key for key, value in _DTYPE_TO_PB.items()}


def tensor_entry_from_pb(message: pb.TensorEntry) -> TensorEntry:
    """Raises UnavailableError for an element type this program does not know."""
    if message.dtype not in _DTYPE_FROM_PB:
        raise UnavailableError(
            f"tensor {message.name}: unknown dtype {message.dtype}; run the same version of "
            "prefill and decode"
        )
    return TensorEntry(
        message.name, _DTYPE_FROM_PB[message.dtype], tuple(message.shape), message.offset
    )


def tensor_batches(entries: Sequence[TensorEntry]) -> Iterator[pb.TensorBatch]:
    """The entries in messages of bounded size."""
    for start in range(0, len(entries), MAX_BATCH_TENSORS):
        yield pb.TensorBatch(
            tensors=[
                pb.TensorEntry(
                    name=entry.name,
                    dtype=_DTYPE_TO_PB[entry.dtype],
                    shape=entry.shape,
                    offset=entry.offset,
                )
                for entry in entries[start : start + MAX_BATCH_TENSORS]
            ]
        )
