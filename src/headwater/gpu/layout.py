"""What of a model is streamed to a device, in which pieces, and how the pieces are read there.

Owns the cut: per layer one item of everything but its routed experts, then its experts in groups.
Experts are stacked without gaps in the weights segment, so a group is a run of bytes of each of the
layer's expert tensors, shards of all NUMA nodes included, and is copied as it lies.
With several ranks each streams its own experts, a run of every layer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headwater.gpu.host_ranges import HostRange, page_range
from headwater.gpu.memory_plan import GROUP_BYTES
from headwater.gpu.ring import aligned
from headwater.gpu.streamer import StreamItem
from headwater.model.layer_spec import MoeFfnSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headwater.model.source import Weights
    from headwater.model.spec import ModelSpec

DENSE_RING, EXPERT_RING = 0, 1

_EXPERTS = "experts."


@dataclass(frozen=True, slots=True)
class PartView:
    """How one part of an item is read: `name` is the tensor's below its layer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts [first, first + count) of a layer, as one item."""

    key: tuple[int, int]
    first: int
    count: int
    views: tuple[PartView, ...]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's items: `dense_views`, and `groups` of the experts that this rank owns."""

    dense_key: tuple[int, int]
    dense_views: tuple[PartView, ...]
    groups: tuple[ExpertGroup, ...]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All layers, the items in their order of use, and the host ranges that these lie in."""

    layers: tuple[LayerLayout, ...]
    items: tuple[StreamItem, ...]
    ranges: tuple[HostRange, ...]

    def ring_sizes(self, ring: int) -> tuple[int, int]:
        """Number of the ring's items, and bytes of a slot that holds any of them."""
        sizes = [
            sum(aligned(p.numel()) for p in item.parts) for item in self.items if item.ring == ring
        ]
        return len(sizes), max(sizes, default=0)


def expert_range(num_experts: int, rank: int, world_size: int) -> range:
    """The experts of a rank: runs whose lengths differ by one at most."""
    return range(num_experts * rank // world_size, num_experts * (rank + 1) // world_size)


def lay_out(
    spec: ModelSpec,
    weights: Weights,
    *,
    rank: int = 0,
    world_size: int = 1,
    group_bytes: int = GROUP_BYTES,
) -> ModelLayout:
    """Cuts the model into items; nothing is copied."""
    names = [tensor.name for tensor in spec.tensors()]
    layers: list[LayerLayout] = []
    items: list[StreamItem] = []
    ranges: dict[HostRange, int] = {}
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}."
        mine = [name for name in names if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): weights.tensor(name) for name in mine}
        place = ranges.setdefault(_range_of(list(tensors.values())), len(ranges))
        dense = {name: t for name, t in tensors.items() if not name.startswith(_EXPERTS)}
        key = (index, -1)
        items.append(StreamItem(key, tuple(map(_bytes, dense.values())), DENSE_RING, place))
        views = tuple(PartView(name, t.dtype, tuple(t.shape)) for name, t in dense.items())
        groups: list[ExpertGroup] = []
        if isinstance(layer.ffn, MoeFfnSpec):
            experts = {
                name.removeprefix(_EXPERTS): t
                for name, t in tensors.items()
                if name.startswith(_EXPERTS)
            }
            owned = expert_range(layer.ffn.num_experts, rank, world_size)
            for group, parts in _groups(index, experts, owned, group_bytes):
                groups.append(group)
                items.append(StreamItem(group.key, parts, EXPERT_RING, place))
        layers.append(LayerLayout(key, views, tuple(groups)))
    return ModelLayout(tuple(layers), tuple(items), tuple(ranges))


def view_parts(parts: Sequence[Tensor], views: Sequence[PartView]) -> dict[str, Tensor]:
    """An item's bytes on the device as the tensors that they are."""
    return {
        view.name: part.view(view.dtype).view(view.shape)
        for part, view in zip(parts, views, strict=True)
    }


def _groups(
    layer: int, experts: dict[str, Tensor], owned: range, group_bytes: int
) -> list[tuple[ExpertGroup, tuple[Tensor, ...]]]:
    expert_bytes = sum(_bytes(t[:1]).numel() for t in experts.values())
    size = max(1, min(len(owned), group_bytes // expert_bytes))
    # As even as can be: the last group of a layer is not much smaller than the others.
    num_groups = math.ceil(len(owned) / size) if owned else 0
    found = []
    for number in range(num_groups):
        first = owned.start + len(owned) * number // num_groups
        stop = owned.start + len(owned) * (number + 1) // num_groups
        cut = {name: t[first:stop] for name, t in experts.items()}
        views = tuple(PartView(name, t.dtype, tuple(t.shape)) for name, t in cut.items())
        group = ExpertGroup((layer, number), first, stop - first, views)
        found.append((group, tuple(map(_bytes, cut.values()))))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, as they lie."""
    assert tensor.is_contiguous(), "weights lie without gaps"
    return tensor.reshape(-1).view(torch.uint8)


def _range_of(tensors: Sequence[Tensor]) -> HostRange:
    """The pages of a layer, whose tensors lie one behind the other."""
    start = min(t.data_ptr() for t in tensors)
    stop = max(t.data_ptr() + t.nbytes for t in tensors)
    return page_range(start, stop - start)
