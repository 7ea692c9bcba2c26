"""Reads what a checkpoint folder holds, without reading its weights.

Owns the safetensors header format, the shard index and the checkpoint's digest. Does not decide
which tensors are needed (see plan.py) and moves no tensor bytes (see loader.py).

A safetensors file is an 8-byte little-endian length, that many bytes of JSON, then the data. The
JSON maps tensor names to {dtype, shape, data_offsets}, offsets counted from the end of the JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

from headwater.errors import CheckpointError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FETCH_AGAIN = "fetch the file again"

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor in a file; `dtype` is its safetensors name, `file_offset` counts from the start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    file_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds.

    `digest` is the SHA-256 of config.json and of each weights file's name, size, modification time
    and header: it tells two checkpoints apart without reading their data.
    """

    folder: Path
    config_json: str
    tensors: dict[str, CheckpointTensor]
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Shard:
    tensors: dict[str, CheckpointTensor]
    header: bytes
    file_bytes: int
    mtime_ns: int


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads config, index and headers of a folder with model.safetensors or its shard index.

    Raises CheckpointError naming file, tensor and field of whatever is missing or inconsistent.
    """
    config_json = _read_text(folder / CONFIG_FILE)
    hasher = hashlib.sha256(b"headwater checkpoint 1\0" + config_json.encode())
    shard_of = _read_index(folder)
    tensors: dict[str, CheckpointTensor] = {}
    for file_name in sorted(set(shard_of.values())) if shard_of else [SINGLE_FILE]:
        shard = _read_shard(folder / file_name)
        stamp = f"\0{file_name}\0{shard.file_bytes}\0{shard.mtime_ns}\0"
        hasher.update(stamp.encode() + shard.header)
        for name, tensor in shard.tensors.items():
            if not shard_of or shard_of.get(name) == file_name:
                tensors[name] = tensor
    for name, file_name in shard_of.items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: tensor '{name}' should be in {file_name}, which does not "
                f"hold it; {_FETCH_AGAIN}"
            )
    return Checkpoint(folder, config_json, tensors, hasher.digest())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; a model folder holds {CONFIG_FILE} and safetensors files"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_index(folder: Path) -> dict[str, str]:
    """Maps tensor names to shard file names; empty for a checkpoint in a single file."""
    if (folder / SINGLE_FILE).exists():
        return {}
    path = folder / INDEX_FILE
    if not path.exists():
        raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    content = _parse_json(_read_text(path), path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: field 'weight_map' is missing or empty; {_FETCH_AGAIN}")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{path}: tensor '{name}': expected a plain file name, got {file_name!r}"
            )
    return weight_map


def _parse_json(text: str, path: Path) -> dict[str, object]:
    def refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: field '{repeated}' occurs twice")
        return content

    try:
        content = json.loads(text, object_pairs_hook=refuse_repeats)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}; {_FETCH_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _read_shard(path: Path) -> _Shard:
    try:
        with path.open("rb") as file:
            return _read_open_shard(path, file)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_open_shard(path: Path, file: BinaryIO) -> _Shard:
    status = path.stat()
    length_field = file.read(8)
    header_bytes = int.from_bytes(length_field, "little")
    if len(length_field) < 8 or header_bytes > status.st_size - 8:
        raise CheckpointError(
            f"{path}: is truncated: it has {status.st_size} bytes, its header alone needs "
            f"{8 + header_bytes}; {_FETCH_AGAIN}"
        )
    if header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: its header claims {header_bytes} bytes, at most {_MAX_HEADER_BYTES} are "
            "allowed; it is not a safetensors file"
        )
    header = file.read(header_bytes)
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: its header is not UTF-8: {error}") from error
    content = _parse_json(text, path)
    content.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {t.name: t for t in _parse_tensors(content, path, data_start)}
    _check_coverage(tensors, path, data_start, status.st_size)
    return _Shard(tensors, header, status.st_size, status.st_mtime_ns)


def _parse_tensors(
    content: dict[str, object], path: Path, data_start: int
) -> Iterator[CheckpointTensor]:
    for name, fields in content.items():
        where = f"{path}: tensor '{name}'"
        if not isinstance(fields, dict):
            raise CheckpointError(f"{where}: expected a JSON object, got {fields!r}")
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: field 'dtype': unknown value {dtype!r}")
        if not _is_sizes(shape):
            raise CheckpointError(f"{where}: field 'shape': expected sizes, got {shape!r}")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(
                f"{where}: field 'data_offsets': expected [begin, end], got {offsets!r}"
            )
        begin, end = offsets
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if end - begin != num_bytes:
            raise CheckpointError(
                f"{where}: field 'data_offsets' spans {end - begin} bytes, but dtype {dtype} and "
                f"shape {shape} need {num_bytes}; {_FETCH_AGAIN}"
            )
        yield CheckpointTensor(name, dtype, tuple(shape), path, data_start + begin, num_bytes)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_coverage(
    tensors: dict[str, CheckpointTensor], path: Path, data_start: int, file_bytes: int
) -> None:
    """Raises unless the data is covered exactly once: a gap or an overlap means damage."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.file_offset, t.num_bytes)):
        if tensor.file_offset != position:
            raise CheckpointError(
                f"{path}: tensor '{tensor.name}': its data begins at byte {tensor.file_offset}, "
                f"expected {position}; the file is damaged, {_FETCH_AGAIN}"
            )
        position += tensor.num_bytes
    if position != file_bytes:
        problem = "is truncated" if position > file_bytes else "has bytes that no tensor covers"
        raise CheckpointError(
            f"{path}: {problem}: its header describes {position} bytes, it has {file_bytes}; "
            f"{_FETCH_AGAIN}"
        )
