"""WeightsStore: a sealed weights segment read as torch tensors, without a copy.

Owns the mapping from names to tensor views. Does not load (see loader.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from headwater.errors import SegmentError
from headwater.shm import Segment, SegmentHandle
from headwater.weights.manifest import read_manifest
from headwater.weights.placement import Placement
from headwater.weights.tensors import DType, TensorEntry

_TORCH_DTYPES = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.U8: torch.uint8,
}


class WeightsStore:
    """The tensors of one checkpoint.

    `was_reattached` says that they were found in shared memory and not loaded from disk;
    `placement`, for experts in shards, on which NUMA nodes their pages are.
    """

    def __init__(
        self,
        segment: Segment,
        entries: Iterable[TensorEntry],
        config_json: str,
        *,
        was_reattached: bool,
    ) -> None:
        self.segment = segment
        self.entries = {entry.name: entry for entry in entries}
        self.config_json = config_json
        self.was_reattached = was_reattached
        self.placement: Placement | None = None

    @classmethod
    def attach(
        cls, handle: SegmentHandle, entries: Iterable[TensorEntry], config_json: str = ""
    ) -> WeightsStore:
        """Maps another process's weights read-only. Raises SegmentError as Segment.attach does."""
        segment = Segment.attach_handle(handle)
        return cls(segment, entries, config_json, was_reattached=True)

    @classmethod
    def from_segment(cls, segment: Segment) -> WeightsStore:
        """Reads the manifest of an attached segment. Raises SegmentError when it is damaged."""
        entries, config_json = read_manifest(segment)
        return cls(segment, entries, config_json, was_reattached=True)

    @property
    def handle(self) -> SegmentHandle:
        """What another process needs to attach."""
        return self.segment.handle

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as it lies in shared memory; it keeps the memory mapped and is read-only.

        Writing to it is a bug that ends the process. Raises SegmentError for an unknown name.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise SegmentError(f"segment '{self.segment.name}' holds no tensor '{name}'")
        view = self.segment.view(entry.offset, entry.num_bytes)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so each time; here that is the intention.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(view, dtype=_TORCH_DTYPES[entry.dtype])
        return flat.reshape(entry.shape)

    def close(self) -> None:
        """Lets the segment go; tensors still in use keep it mapped. The segment itself stays."""
        self.segment.close()
