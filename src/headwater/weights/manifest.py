"""The manifest: a weights segment's own table of contents.

Owns its encoding. It lies in the segment itself, so that a restarted owner finds the tensors again
without the checkpoint's help. The payload begins with a prelude of 4096 bytes:

    byte  size  field
       0     8  magic             "HWWEIGHT"
       8     4  manifest version  1
      12     4  zero
      16     8  manifest offset   counted from the payload
      24     8  manifest bytes

Numbers are little-endian. The manifest is UTF-8 JSON: {"config_json": text, "tensors": [[name,
dtype, shape, offset], ...]}.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

from headwater.errors import SegmentError
from headwater.shm import Segment
from headwater.weights.tensors import DType, TensorEntry

WEIGHTS_LAYOUT_VERSION = 1
"""Layout version in the header of weights segments; counts changes of payload or naming."""

PRELUDE_BYTES = 4096

_MAGIC = b"HWWEIGHT"
_MANIFEST_VERSION = 1
_PRELUDE = struct.Struct("<8sIIQQ")


def encode_manifest(entries: Iterable[TensorEntry], config_json: str) -> bytes:
    """The manifest's bytes; equal content gives equal bytes."""
    tensors = [[e.name, e.dtype.value, list(e.shape), e.offset] for e in entries]
    content = {"config_json": config_json, "tensors": tensors}
    return json.dumps(content, separators=(",", ":")).encode()


def write_manifest(segment: Segment, manifest: bytes, offset: int) -> None:
    """Writes prelude and manifest into a segment being filled; `offset` counts from the payload."""
    prelude = _PRELUDE.pack(_MAGIC, _MANIFEST_VERSION, 0, offset, len(manifest))
    _write(segment, 0, prelude)
    _write(segment, offset, manifest)


def read_manifest(segment: Segment) -> tuple[tuple[TensorEntry, ...], str]:
    """The entries and the text of config.json. Raises SegmentError when they make no sense."""
    prelude = bytes(memoryview(segment.view(0, _PRELUDE.size)))
    magic, version, _, offset, num_bytes = _PRELUDE.unpack(prelude)
    if magic != _MAGIC or version != _MANIFEST_VERSION:
        raise SegmentError(
            f"segment '{segment.name}': check 'manifest' failed: expected {_MAGIC!r} version "
            f"{_MANIFEST_VERSION}, found {magic!r} version {version}"
        )
    text = bytes(memoryview(segment.view(offset, num_bytes)))
    try:
        content = json.loads(text)
        entries = tuple(
            TensorEntry(name, DType(dtype), tuple(shape), start)
            for name, dtype, shape, start in content["tensors"]
        )
        config_json = str(content["config_json"])
    except (ValueError, KeyError, TypeError) as error:
        raise SegmentError(
            f"segment '{segment.name}': check 'manifest' failed: {error!r}"
        ) from error
    return entries, config_json


def _write(segment: Segment, offset: int, data: bytes) -> None:
    segment.populate(offset, len(data))
    memoryview(segment.view(offset, len(data)))[:] = data
