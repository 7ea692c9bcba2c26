"""Decides where each tensor of a model goes: a pure function of checkpoint and tensor list.

Owns the matching of TensorSpecs to checkpoint tensors, what can be copied and what has to be
converted, and the payload layout of a weights segment:

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
from headwater.weights.decode import Stored, stored_form
from headwater.weights.manifest import PRELUDE_BYTES, WEIGHTS_LAYOUT_VERSION, encode_manifest
from headwater.weights.tensors import DType, Encoding, TensorEntry, TensorPart, TensorSpec

TENSOR_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """Where a rectangle of a converted tensor goes, without gaps; `dest_offset` in the payload."""

    dest_offset: int
    first_row: int
    first_column: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checkpoint tensor that cannot be copied as it lies.

    Decoded, it is [rows, columns] of `dtype`; `targets` are what is taken of it.
    """

    tensor: CheckpointTensor
    encoding: Encoding | None
    shape: tuple[int, int]
    dtype: DType
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything a load needs: `pieces` to copy, `conversions` to make, and the `manifest`.

    Offsets count from the payload. `digest` identifies the content: checkpoint, layout and list.
    """

    entries: tuple[TensorEntry, ...]
    pieces: tuple[Piece, ...]
    conversions: tuple[Conversion, ...]
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
    conversions: list[Conversion] = []
    position = PRELUDE_BYTES
    for spec in specs:
        position = _align(position)
        sources = [_find(part, checkpoint) for part in spec.parts]
        encoding, dtype = _common_form(spec, sources)
        entry = TensorEntry(spec.name, dtype, spec.shape, position)
        _place(entry, spec, encoding, sources, pieces, conversions)
        entries.append(entry)
        position += entry.num_bytes
    manifest = encode_manifest(entries, checkpoint.config_json)
    return LoadPlan(
        entries=tuple(entries),
        pieces=tuple(pieces),
        conversions=tuple(conversions),
        manifest=manifest,
        manifest_offset=position,
        payload_bytes=position + len(manifest),
        digest=_digest(checkpoint, manifest),
    )


def whole_conversions(spec: TensorSpec, checkpoint: Checkpoint) -> tuple[Conversion, ...]:
    """Each part of `spec`, decoded as a whole and going nowhere: for who reads without a segment.

    Raises CheckpointError as plan_load does.
    """
    sources = [_find(part, checkpoint) for part in spec.parts]
    encoding, dtype = _common_form(spec, sources)
    return tuple(
        Conversion(tensor, encoding, _as_matrix(_source_shape(spec, part)), dtype, ())
        for part, tensor in zip(spec.parts, sources, strict=True)
    )


def find_part(spec: TensorSpec, element: int) -> TensorPart:
    """The part that fills the element at flat index `element` of the tensor."""
    for part in spec.parts:
        num_elements = math.prod(spec.shape[len(part.index) :])
        first = _flat_index(part.index, spec.shape) * num_elements
        if first <= element < first + num_elements:
            return part
    raise AssertionError(f"{spec.name}: element {element} is not covered")


def _find(part: TensorPart, checkpoint: Checkpoint) -> CheckpointTensor:
    tensor = checkpoint.tensors.get(part.source)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor '{part.source}' is missing; the checkpoint is incomplete "
            "or its config.json describes another model"
        )
    return tensor


def _common_form(
    spec: TensorSpec, sources: Sequence[CheckpointTensor]
) -> tuple[Encoding | None, DType]:
    """How all sources are stored (None: as they lie in the segment), and what they become."""
    first = sources[0]
    encoding, form = _form_of(spec, spec.parts[0], first)
    for part, other in zip(spec.parts, sources, strict=True):
        if other.dtype != first.dtype:
            raise CheckpointError(
                f"{other.file}: tensor '{other.name}': field 'dtype': expected {first.dtype} as in "
                f"'{first.name}', got {other.dtype}; both become parts of '{spec.name}'"
            )
        expected_shape = _stored_shape(encoding, _source_shape(spec, part))
        if other.shape != expected_shape:
            raise CheckpointError(
                f"{other.file}: tensor '{other.name}': field 'shape': expected "
                f"{list(expected_shape)} after config.json, got {list(other.shape)}"
            )
    return encoding, form.target


def _form_of(
    spec: TensorSpec, part: TensorPart, tensor: CheckpointTensor
) -> tuple[Encoding | None, Stored]:
    shape = _source_shape(spec, part)
    forms: list[tuple[Encoding | None, Stored]] = [
        (None, Stored(dtype.value, shape, dtype)) for dtype in spec.dtypes
    ]
    forms += [(encoding, stored_form(encoding, shape)) for encoding in spec.encodings]
    for encoding, form in forms:
        if form.dtype == tensor.dtype:
            return encoding, form
    allowed = dict.fromkeys(form.dtype for _, form in forms)
    raise CheckpointError(
        f"{tensor.file}: tensor '{tensor.name}': field 'dtype': expected "
        f"{' or '.join(allowed)}, got {tensor.dtype}"
    )


def _source_shape(spec: TensorSpec, part: TensorPart) -> tuple[int, ...]:
    return part.cut.shape if part.cut else spec.shape[len(part.index) :]


def _stored_shape(encoding: Encoding | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if encoding is None else stored_form(encoding, shape).shape


def _place(
    entry: TensorEntry,
    spec: TensorSpec,
    encoding: Encoding | None,
    sources: Sequence[CheckpointTensor],
    pieces: list[Piece],
    conversions: list[Conversion],
) -> None:
    """Adds what fills `entry`: runs of bytes where the source has them, conversions elsewhere."""
    assert len({part.index for part in spec.parts}) == len(spec.parts), f"{spec.name}: overlap"
    targets: dict[str, list[Target]] = {}
    found: dict[str, tuple[CheckpointTensor, tuple[int, int]]] = {}
    covered_bytes = 0
    for part, tensor in zip(spec.parts, sources, strict=True):
        num_rows, num_columns = _as_matrix(spec.shape[len(part.index) :])
        source_rows, source_columns = _as_matrix(_source_shape(spec, part))
        row, column = (part.cut.first_row, part.cut.first_column) if part.cut else (0, 0)
        assert row + num_rows <= source_rows, f"{spec.name}: cut outside"
        assert column + num_columns <= source_columns, f"{spec.name}: cut outside"
        row_bytes = source_columns * entry.dtype.item_bytes
        num_bytes = num_rows * num_columns * entry.dtype.item_bytes
        dest_offset = entry.offset + _flat_index(part.index, spec.shape) * num_bytes
        covered_bytes += num_bytes
        if encoding in (None, Encoding.WORDS) and num_columns == source_columns:
            offset = tensor.file_offset + row * row_bytes
            pieces.append(Piece(str(tensor.file), offset, num_bytes, dest_offset))
        else:
            found[tensor.name] = tensor, (source_rows, source_columns)
            target = Target(dest_offset, row, column, num_rows, num_columns)
            targets.setdefault(tensor.name, []).append(target)
    assert covered_bytes == entry.num_bytes, f"{spec.name}: parts do not cover"
    for name, (tensor, shape) in found.items():
        conversions.append(Conversion(tensor, encoding, shape, entry.dtype, tuple(targets[name])))


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape with all but the last dimension taken together."""
    return math.prod(shape[:-1]), shape[-1]


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
