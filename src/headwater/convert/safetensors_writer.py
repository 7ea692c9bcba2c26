"""Writes safetensors files piece by piece, so that neither a model nor a tensor need fit in memory.

Owns the file format on the writing side, the cut into shards included; headwater.weights.checkpoint
reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from headwater.weights.checkpoint import INDEX_FILE, ITEM_BYTES, SINGLE_FILE

ProgressFunction = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes in all."""

MAX_SHARD_BYTES = 8 << 30

_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write, of a safetensors `dtype`; `make` returns its values in runs, in order.

    The runs' own dtypes and shapes do not matter, their bytes do. Tensors are made in the order in
    which they are written, so one may use what came out while another was made.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Iterable[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_safetensors(
    path: Path, tensors: Sequence[OutTensor], on_progress: ProgressFunction | None = None
) -> None:
    """Writes the tensors in the order given into one file."""
    _write_file(path, tensors, 0, _total_bytes(tensors), on_progress)


def write_shards(
    folder: Path,
    tensors: Sequence[OutTensor],
    on_progress: ProgressFunction | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the tensors into `folder`: one file, or, where that grew too large, files and index.

    A file holds at least one tensor, whatever its size.
    """
    shards = list(_cut(tensors, max_shard_bytes))
    if len(shards) == 1:
        write_safetensors(folder / SINGLE_FILE, tensors, on_progress)
        return
    total_bytes, done_bytes = _total_bytes(tensors), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / file_name, shard, done_bytes, total_bytes, on_progress)
        done_bytes += _total_bytes(shard)
        weight_map |= {tensor.name: file_name for tensor in shard}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def _total_bytes(tensors: Sequence[OutTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _cut(tensors: Sequence[OutTensor], max_bytes: int) -> Iterator[Sequence[OutTensor]]:
    shard: list[OutTensor] = []
    shard_bytes = 0
    for tensor in tensors:
        if shard and shard_bytes + tensor.num_bytes > max_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(tensor)
        shard_bytes += tensor.num_bytes
    yield shard


def _write_file(
    path: Path,
    tensors: Sequence[OutTensor],
    done_bytes: int,
    total_bytes: int,
    on_progress: ProgressFunction | None,
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.num_bytes]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for num_bytes in _write_tensor(file, tensor):
                done_bytes += num_bytes
                if on_progress is not None:
                    on_progress(done_bytes, total_bytes)


def _write_tensor(file: BinaryIO, tensor: OutTensor) -> Iterator[int]:
    """Yields the bytes of each run once they are written."""
    written_bytes = 0
    for values in tensor.make():
        data = values.contiguous().view(-1).view(torch.uint8).numpy()
        file.write(data.data)
        written_bytes += data.nbytes
        yield data.nbytes
    assert written_bytes == tensor.num_bytes, f"{tensor.name}: made {written_bytes} bytes"
