"""Which NUMA node each part of the weights belongs to, and whether it is there.

Owns the rule: shard s of every routed expert belongs to node s, and all else is spread over the
nodes page by page, so that every node's memory helps to read it. Allocates nothing; the policy must
be set before the pages are filled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import NotPermittedError
from headwater.shm import Segment
from headwater.weights.tensors import TensorEntry

_NODES_FILE = Path("/sys/devices/system/node/has_memory")
_STATUS_FILE = Path("/proc/self/status")
_EXPERTS = ".experts."
_SHARD_DIMENSION = 1
_PAGE_BYTES = 4096
_CHECKED_PAGES = 4096
_SEED = 0
REMEDY = (
    "give the container the capability SYS_NICE (cap_add: [SYS_NICE]), or set model.shards to 1"
)


@dataclass(frozen=True, slots=True)
class ShardRanges:
    """Payload ranges (offset, bytes) of one shard, and the node it belongs to."""

    node: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the experts' pages are, judged by a sample: `misplaced_pages` of `checked_pages`.

    `nodes` holds the node of each shard. `problem` says why pages could not be placed or checked.
    """

    nodes: tuple[int, ...]
    checked_pages: int = 0
    misplaced_pages: int = 0
    problem: str = ""


def memory_nodes() -> tuple[int, ...]:
    """The NUMA nodes with memory that this process may use; (0,) where the kernel has no NUMA."""
    try:
        nodes = _parse_list(_NODES_FILE.read_text())
        status = dict(line.split(":", 1) for line in _STATUS_FILE.read_text().splitlines())
    except OSError:
        return (0,)
    allowed = _parse_list(status.get("Mems_allowed_list", ""))
    return tuple(sorted(nodes & allowed)) or (0,)


def shard_ranges(
    entries: Sequence[TensorEntry], shards: int, nodes: Sequence[int]
) -> tuple[ShardRanges, ...]:
    """The ranges of each shard of the routed experts; shards share the nodes evenly, in order."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    for entry in entries:
        if _EXPERTS not in entry.name:
            continue
        assert entry.shape[_SHARD_DIMENSION] == shards, f"{entry.name} has other shards"
        num_bytes = math.prod(entry.shape[_SHARD_DIMENSION + 1 :]) * entry.dtype.item_bytes
        for expert in range(entry.shape[0]):
            for shard in range(shards):
                start = entry.offset + (expert * shards + shard) * num_bytes
                ranges[shard].append((start, num_bytes))
    return tuple(
        ShardRanges(nodes[shard * len(nodes) // shards], tuple(found))
        for shard, found in enumerate(ranges)
    )


def place(
    segment: Segment, entries: Sequence[TensorEntry], shards: int, nodes: Sequence[int]
) -> None:
    """Sets the policy of every page, tensor by tensor; without shards all is spread over the nodes.

    Raises NotPermittedError, with the remedy, where the kernel forbids it.
    """
    try:
        _place(segment, entries, shards, nodes)
    except NotPermittedError as error:
        raise NotPermittedError(f"{error}; {REMEDY}") from error


def _place(
    segment: Segment, entries: Sequence[TensorEntry], shards: int, nodes: Sequence[int]
) -> None:
    for entry in entries:
        if shards > 1 and _EXPERTS in entry.name:
            for shard in shard_ranges([entry], shards, nodes):
                segment.place(shard.ranges, [shard.node])
        else:
            segment.place([(entry.offset, entry.num_bytes)], nodes)


def check_placement(
    segment: Segment, entries: Sequence[TensorEntry], shards: int, nodes: Sequence[int]
) -> Placement:
    """Looks where a sample of the experts' pages are; never raises for what it finds."""
    found = shard_ranges(entries, shards, nodes)
    shard_nodes = tuple(shard.node for shard in found)
    chance = random.Random(_SEED)
    offsets: list[int] = []
    expected: list[int] = []
    for shard in found:
        # Pages on the edge of a range belong to two shards.
        inner = [(start, size) for start, size in shard.ranges if size >= 3 * _PAGE_BYTES]
        for start, size in chance.choices(inner, k=_CHECKED_PAGES // shards) if inner else ():
            offsets.append(start + chance.randrange(_PAGE_BYTES, size - _PAGE_BYTES))
            expected.append(shard.node)
    try:
        actual = segment.nodes_of(offsets)
    except NotPermittedError as error:
        return Placement(shard_nodes, problem=f"cannot be checked: {error}; {REMEDY}")
    misplaced = sum(a != b for a, b in zip(actual, expected, strict=True))
    return Placement(shard_nodes, len(offsets), misplaced)


def _parse_list(text: str) -> set[int]:
    """'0-1,4' -> {0, 1, 4}."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
