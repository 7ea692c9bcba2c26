"""Random weights of a published shape in host memory, a few layers of them repeated as needed.

Every byte that a sweep reads is really read: repeated layers lie far enough apart that no cache
holds them, and each repetition has a gate of its own, so that it does not choose the same experts
again. Memory is a memfd, which is what /dev/shm files are made of, or private memory.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from headwater.bench.timing import huge_buffer
from headwater.gpu.ring import aligned
from headwater.model.layer_spec import MoeFfnSpec
from headwater.weights.tensors import DType

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.model.spec import ModelSpec
    from headwater.weights.tensors import TensorSpec

_TILE = 1 << 26
_PAGE = 4096
_FP8_SPREAD = 100.0
_THREADS = 16
_DTYPES = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F8_E4M3: torch.float8_e4m3fn,
}


class RandomModel:
    """Weights (see headwater.model.source) of FP8 and BF16; `distinct` routed layers differ.

    With `in_huge_pages` memory is private, and of the pages that /dev/shm gives where the kernel's
    shmem_enabled is `advise`.
    """

    def __init__(self, spec: ModelSpec, distinct: int, *, in_huge_pages: bool = False) -> None:
        self._in_huge_pages = in_huge_pages
        self._tensors: dict[str, Tensor] = {}
        self.num_bytes = 0
        routed = [i for i, la in enumerate(spec.layers) if isinstance(la.ffn, MoeFfnSpec)]
        dense = [i for i in range(spec.num_layers) if i not in routed]
        sources = {i: routed[n % distinct] for n, i in enumerate(routed)}
        sources |= {i: dense[n % distinct] for n, i in enumerate(dense)}
        by_layer: dict[str, list[TensorSpec]] = {}
        for tensor in spec.tensors():
            number = tensor.name.split(".")[1] if tensor.name.startswith("layers.") else ""
            by_layer.setdefault(number, []).append(tensor)
        gates: dict[int, list[TensorSpec]] = {source: [] for source in sources.values()}
        for layer, source in sources.items():
            names = (f"layers.{layer}.gate", f"layers.{layer}.gate.bias")
            if layer != source:
                gates[source] += [t for t in by_layer[str(layer)] if t.name in names]
        tiles = _Tiles()
        self._fill(by_layer[""], tiles)
        for source in sorted(gates):
            first, *others = by_layer[str(source)]
            # In between, so that a layer's memory goes from the first to the last as ever.
            self._fill([first, *gates[source], *others], tiles)
        for layer, source in sources.items():
            for tensor in by_layer[str(layer)]:
                suffix = tensor.name.removeprefix(f"layers.{layer}.")
                found = self._tensors[f"layers.{source}.{suffix}"]
                self._tensors.setdefault(tensor.name, found)

    def tensor(self, name: str) -> Tensor:
        """See Weights."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def _fill(self, tensors: list[TensorSpec], tiles: _Tiles) -> None:
        """Lays tensors out one behind the other in memory of their own, and fills them."""
        dtypes = [DType.BF16 if DType.BF16 in t.dtypes else t.dtypes[0] for t in tensors]
        sizes = [
            torch.Size(t.shape).numel() * d.item_bytes for t, d in zip(tensors, dtypes, strict=True)
        ]
        num_bytes = sum(-(-size // _PAGE) * _PAGE for size in sizes)
        memory = huge_buffer(num_bytes) if self._in_huge_pages else _shared_memory(num_bytes)
        self.num_bytes += memory.numel()
        start = 0
        with ThreadPoolExecutor(_THREADS) as pool:
            for tensor, dtype, size in zip(tensors, dtypes, sizes, strict=True):
                flat = memory[start : start + size]
                start += -(-size // _PAGE) * _PAGE
                tile = tiles.of(tensor, dtype)
                for piece, first in enumerate(range(0, size, _TILE // 2)):
                    target = flat[first : first + _TILE // 2]
                    offset = (piece * 7919 + len(self._tensors)) * 512 % (_TILE // 2)
                    pool.submit(target.copy_, tile[offset : offset + target.numel()])
                self._tensors[tensor.name] = flat.view(_DTYPES[dtype]).view(tensor.shape)


class _Tiles:
    """64 MiB of every kind of content."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)
        codes = torch.randn(_TILE, generator=self._generator) * _FP8_SPREAD
        self._codes = codes.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        self._normal = torch.randn(_TILE // 2, generator=self._generator)
        self._cache: dict[tuple[float, float, DType], Tensor] = {}

    def of(self, tensor: TensorSpec, dtype: DType) -> Tensor:
        """Bytes for `tensor`, scaled so that activations keep their size."""
        if dtype is DType.F8_E4M3:
            return self._codes
        name, columns = tensor.name, tensor.shape[-1]
        spread, mean = columns**-0.5, 0.0
        if name.endswith(".scale"):
            spread, mean = 0.0, 1 / (_FP8_SPREAD * (128 * columns) ** 0.5)
        elif name.endswith("norm"):
            spread, mean = 0.05, 1.0
        elif name.endswith("gate.bias"):
            spread = 0.01
        elif name == "embed":
            spread = 1.0
        key = (spread, mean, dtype)
        if key not in self._cache:
            count = _TILE // dtype.item_bytes
            values = self._normal[:count] * spread + mean
            self._cache[key] = values.to(_DTYPES[dtype]).view(torch.uint8)
        return self._cache[key]


def _shared_memory(num_bytes: int) -> Tensor:
    """UINT8 of a memfd, in huge pages where the kernel gives them."""
    size = aligned(num_bytes) + _PAGE
    handle = os.memfd_create("headwater-bench")
    os.ftruncate(handle, size)
    memory = mmap.mmap(handle, size)
    os.close(handle)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
