"""Writes a safetensors file one tensor at a time, so that a model need not fit in memory.

Owns the file format on the writing side; headwater.weights.checkpoint reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headwater.weights.tensors import DType

_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write; `make` returns its values, of the dtype and shape promised."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.item_bytes


def write_safetensors(
    path: Path,
    tensors: Sequence[OutTensor],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the tensors in the order given; reports bytes written and bytes in all."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total_bytes = 0
    for tensor in tensors:
        offsets = [total_bytes, total_bytes + tensor.num_bytes]
        header[tensor.name] = {
            "dtype": tensor.dtype.value,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        total_bytes = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    done_bytes = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = tensor.make()
            assert values.shape == tensor.shape, f"{tensor.name}: made {list(values.shape)}"
            data = values.contiguous().view(torch.uint8).numpy()
            assert data.nbytes == tensor.num_bytes, f"{tensor.name}: made {values.dtype}"
            data.tofile(file)
            done_bytes += tensor.num_bytes
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)
