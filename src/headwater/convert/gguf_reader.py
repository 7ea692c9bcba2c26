"""Reads a llama-architecture GGUF file: metadata with names, tensors as float32.

Owns the mapping away from GGUF's conventions: dequantisation, and the row order of query and key
weights. Does not decide what to write (see gguf.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from headwater.errors import CheckpointError

FloatArray = npt.NDArray[np.float32]

T = TypeVar("T", str, int, float, bool)


class GgufFile:
    """An open GGUF file. Tensors are read when asked for; the file stays mapped meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file is missing, damaged or not of llama architecture."""
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{path}: is not a complete GGUF file ({error}); fetch it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.get("general.architecture", str)
        if architecture != "llama":
            raise CheckpointError(
                f"{path}: field 'general.architecture': only llama is supported, "
                f"got {architecture!r}"
            )

    @property
    def tensor_names(self) -> set[str]:
        """Names of all tensors, in GGUF's naming."""
        return set(self._tensors)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value. Raises CheckpointError when it is absent without a default, or no
        `kind`."""
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise CheckpointError(f"{self.path}: field '{key}' is missing")
            return default
        value = field.contents()
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{self.path}: field '{key}': expected {kind.__name__}, got {value!r}"
            )
        return value

    def get_list(self, key: str, kind: type[T]) -> list[T]:
        """A metadata array. Raises CheckpointError when it is absent or holds other things."""
        field = self._reader.fields.get(key)
        if field is None:
            raise CheckpointError(f"{self.path}: field '{key}' is missing")
        values = field.contents()
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise CheckpointError(
                f"{self.path}: field '{key}': expected an array of {kind.__name__}"
            )
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first. Raises CheckpointError when missing."""
        # GGUF names the fastest dimension first.
        return tuple(int(n) for n in reversed(self._find(name).shape))

    def load(self, name: str) -> FloatArray:
        """A tensor, dequantised. Raises CheckpointError when it is missing or of unknown type."""
        tensor = self._find(name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor '{name}': type {tensor.tensor_type.name} cannot be read"
            ) from error
        # A copy: what needs no dequantisation would otherwise be the read-only file itself.
        return np.array(values, dtype=np.float32).reshape(self.shape(name))

    def load_rotary(self, name: str, num_heads: int) -> FloatArray:
        """A query or key weight [num_heads * head_dim, hidden], rows in half-rotation order.

        llama GGUFs keep the two rows of each rotary pair next to each other; model code that
        rotates halves wants all first rows of a head, then all second ones.
        """
        weight = self.load(name)
        rows, columns = weight.shape
        pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)

    def _find(self, name: str) -> gguf.ReaderTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor '{name}' is missing")
        return tensor
