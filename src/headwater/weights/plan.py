"""Decides where each tensor of a model goes: a pure function of checkpoint and tensor list.

Owns the matching of TensorSpecs to checkpoint tensors and the payload layout of a weights segment:

    0        prelude, see manifest.py
    4096     tensors, each at a multiple of 4096, in the order of the list
    ...      manifest, right behind the last tensor

Does no I/O.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import CheckpointError
from headwater.shm import Piece
from headwater.weights.checkpoint import Checkpoint, CheckpointTensor
from headwater.weights.manifest import PRELUDE_BYTES, WEIGHTS_LAYOUT_VERSION, encode_manifest
from headwater.weights.tensors import DType, TensorEntry, TensorPart, TensorSpec

TENSOR_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything a load needs: `pieces` to copy, `manifest` to write at `manifest_offset`.

    Offsets count from the payload. `digest` identifies the content: checkpoint, layout and list.
    """

    entries: tuple[TensorEntry, ...]
    pieces: tuple[Piece, ...]
    manifest: bytes
    manifest_offset: int
    payload_bytes: int
    digest: bytes


def plan_load(specs: Sequence[TensorSpec], checkpoint: Checkpoint) -> LoadPlan:
    """Lays the tensors out one behind the other.

    Raises CheckpointError naming file, tensor and field when one is missing or of another dtype or
    shape than the model needs.
    """
    entries: list[TensorEntry] = []
    pieces: list[Piece] = []
    position = PRELUDE_BYTES
    for spec in specs:
        position = _align(position)
        sources = [_find(part, spec, checkpoint) for part in spec.parts]
        entry = TensorEntry(spec.name, _common_dtype(spec, sources), spec.shape, position)
        pieces += _place(entry, spec, sources)
        entries.append(entry)
        position += entry.num_bytes
    manifest = encode_manifest(entries, checkpoint.config_json)
    return LoadPlan(
        entries=tuple(entries),
        pieces=tuple(pieces),
        manifest=manifest,
        manifest_offset=position,
        payload_bytes=position + len(manifest),
        digest=_digest(checkpoint, manifest),
    )


def find_part(spec: TensorSpec, element: int) -> TensorPart:
    """The part that fills the element at flat index `element` of the tensor."""
    for part in spec.parts:
        num_elements = math.prod(spec.shape[len(part.index) :])
        first = _flat_index(part.index, spec.shape) * num_elements
        if first <= element < first + num_elements:
            return part
    raise AssertionError(f"{spec.name}: element {element} is not covered")


def _find(part: TensorPart, spec: TensorSpec, checkpoint: Checkpoint) -> CheckpointTensor:
    tensor = checkpoint.tensors.get(part.source)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor '{part.source}' is missing; the checkpoint is incomplete "
            "or its config.json describes another model"
        )
    allowed = [dtype.value for dtype in spec.dtypes]
    if tensor.dtype not in allowed:
        raise CheckpointError(
            f"{tensor.file}: tensor '{tensor.name}': field 'dtype': expected "
            f"{' or '.join(allowed)}, got {tensor.dtype}"
        )
    expected_shape = spec.shape[len(part.index) :]
    if tensor.shape != expected_shape:
        raise CheckpointError(
            f"{tensor.file}: tensor '{tensor.name}': field 'shape': expected "
            f"{list(expected_shape)} after config.json, got {list(tensor.shape)}"
        )
    return tensor


def _common_dtype(spec: TensorSpec, sources: Sequence[CheckpointTensor]) -> DType:
    first = sources[0]
    for other in sources:
        if other.dtype != first.dtype:
            raise CheckpointError(
                f"{other.file}: tensor '{other.name}': field 'dtype': expected {first.dtype} as in "
                f"'{first.name}', got {other.dtype}; both become parts of '{spec.name}'"
            )
    return DType(first.dtype)


def _place(
    entry: TensorEntry, spec: TensorSpec, sources: Sequence[CheckpointTensor]
) -> list[Piece]:
    assert sum(t.num_bytes for t in sources) == entry.num_bytes, f"{spec.name}: parts do not cover"
    assert len({part.index for part in spec.parts}) == len(spec.parts), f"{spec.name}: overlap"
    return [
        Piece(
            path=str(tensor.file),
            file_offset=tensor.file_offset,
            num_bytes=tensor.num_bytes,
            dest_offset=entry.offset + _flat_index(part.index, spec.shape) * tensor.num_bytes,
        )
        for part, tensor in zip(spec.parts, sources, strict=True)
    ]


def _flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Row-major position of a part among its equals; 0 for a part that is the whole tensor."""
    flat = 0
    for i, size in zip(index, shape, strict=False):
        assert 0 <= i < size, f"part {index} is outside {shape}"
        flat = flat * size + i
    return flat


def _align(position: int) -> int:
    return -(-position // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES


def _digest(checkpoint: Checkpoint, manifest: bytes) -> bytes:
    version = WEIGHTS_LAYOUT_VERSION.to_bytes(4, "little")
    return hashlib.sha256(checkpoint.digest + version + manifest).digest()
