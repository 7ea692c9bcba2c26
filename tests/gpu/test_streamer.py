"""Rings and the streamer: order, reuse of slots, no read of what is not there yet.

DeferredQueues does nothing until told to, and then what it likes best within the marks' order: a
missing wait shows as wrong bytes, whatever a real device's timing would have hidden.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from headwater.errors import InternalError, ResourceError
from headwater.gpu.ring import Ring, ring_memory
from headwater.gpu.streamer import Streamer, StreamItem
from headwater.gpu.streams import HostQueues, Mark

CPU = torch.device("cpu")


@dataclass(eq=False)
class _Mark:
    is_reached: bool = False

    def synchronize(self) -> None:
        raise AssertionError("the caller must never wait")


@dataclass
class _Queue:
    work: list[Callable[[], object] | _Mark] = field(default_factory=list)
    """What to do in order; a mark in it that is not reached holds the queue back."""


class DeferredQueues:
    """Two queues that run in any order that the marks allow."""

    device = CPU

    def __init__(self, seed: int) -> None:
        self._copies, self._computation = _Queue(), _Queue()
        self._choose = random.Random(seed)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], share: float) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copies.work.append(functools.partial(target.copy_, source))

    def compute(self, step: Callable[[], None]) -> None:
        self._computation.work.append(step)

    def mark_copied(self) -> Mark:
        return self._mark(self._copies)

    def mark_computed(self) -> Mark:
        return self._mark(self._computation)

    def copying_waits(self, mark: Mark) -> None:
        assert isinstance(mark, _Mark)
        self._copies.work.append(mark)

    def computing_waits(self, mark: Mark) -> None:
        assert isinstance(mark, _Mark)
        self._computation.work.append(mark)

    def run_some(self, steps: int) -> None:
        for _ in range(steps):
            able = [q for q in (self._copies, self._computation) if self._is_able(q)]
            if not able:
                return
            step = self._choose.choice(able).work.pop(0)
            if not isinstance(step, _Mark):
                step()

    def run_all(self) -> None:
        self.run_some(1 << 30)
        assert not self._copies.work, "copies wait for ever"
        assert not self._computation.work, "computation waits for ever"

    @staticmethod
    def _is_able(queue: _Queue) -> bool:
        if not queue.work:
            return False
        head = queue.work[0]
        return head.is_reached if isinstance(head, _Mark) else True

    @staticmethod
    def _mark(queue: _Queue) -> Mark:
        mark = _Mark()

        def reach() -> None:
            mark.is_reached = True

        queue.work.append(reach)
        return mark


class _Work:
    """`layers` layers, each a small item and `groups` large ones of different sizes."""

    def __init__(self, layers: int, groups: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.items: list[StreamItem] = []
        for layer in range(layers):
            for group in range(-1, groups):
                sizes = (7,) if group < 0 else (300, 10 + layer)
                parts = tuple(
                    torch.randint(256, (size,), generator=generator).byte() for size in sizes
                )
                self.items.append(StreamItem((layer, group), parts, int(group >= 0)))

    def rings(self, dense_slots: int, expert_slots: int) -> list[Ring]:
        counts = [sum(item.ring == ring for item in self.items) for ring in (0, 1)]
        return [
            Ring(counts[0], 256, ring_memory(dense_slots, 256, CPU)),
            Ring(counts[1], 1024, ring_memory(expert_slots, 1024, CPU)),
        ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [(1, 1), (2, 2), (2, 3), (2, 7), (5, 4), (5, 20)])
def test_whatever_the_timing_the_right_bytes_are_read(slots: tuple[int, int], seed: int) -> None:
    """Rings of one slot up to all, over three sweeps, so that they wrap round and round."""
    work = _Work(layers=5, groups=4)
    queues = DeferredQueues(seed)
    streamer = Streamer(work.items, work.rings(*slots), queues)
    chooser, wrong = random.Random(seed), list[object]()
    for item in work.items * 3:
        parts = streamer.take(item.key)

        def check(parts: list[Tensor] = parts, item: StreamItem = item) -> None:
            if not all(map(torch.equal, parts, item.parts)):
                wrong.append(item.key)

        queues.compute(check)
        streamer.release()
        queues.run_some(chooser.randrange(4))
    queues.run_all()
    assert wrong == []


def test_copies_run_ahead_as_far_as_slots_reach_and_into_the_next_sweep() -> None:
    work = _Work(layers=2, groups=3)
    streamer = Streamer(work.items, work.rings(1, 2), HostQueues())
    streamer.prefetch()
    sizes = [item.num_bytes for item in work.items]
    # The first layer's small item and two of its groups: then a slot is missing.
    assert streamer.copied_bytes == sum(sizes[:3])
    assert streamer.occupancy == 1.0
    for item in work.items:
        streamer.take(item.key)
        streamer.release()
    assert streamer.copied_bytes == sum(sizes) + sum(sizes[:3])


def test_a_ring_with_room_for_all_copies_once() -> None:
    work = _Work(layers=3, groups=2)
    streamer = Streamer(work.items, work.rings(3, 6), HostQueues())
    for item in work.items * 2:
        assert all(map(torch.equal, streamer.take(item.key), item.parts))
        streamer.release()
    assert streamer.copied_bytes == sum(item.num_bytes for item in work.items)


@pytest.mark.parametrize("broken_off_after", range(9))
def test_a_sweep_that_is_broken_off_is_followed_by_a_whole_one(broken_off_after: int) -> None:
    """Cancelled with an item in use and others copied ahead."""
    work = _Work(layers=3, groups=2)
    queues = DeferredQueues(broken_off_after)
    streamer = Streamer(work.items, work.rings(2, 3), queues)
    for item in work.items[:broken_off_after]:
        streamer.take(item.key)
        streamer.release()
    streamer.take(work.items[broken_off_after].key)
    streamer.reset()
    wrong = list[object]()
    for item in work.items:
        parts = streamer.take(item.key)

        def check(parts: list[Tensor] = parts, item: StreamItem = item) -> None:
            if not all(map(torch.equal, parts, item.parts)):
                wrong.append(item.key)

        queues.compute(check)
        streamer.release()
        queues.run_some(3)
    queues.run_all()
    assert wrong == []


def test_taking_without_releasing_is_a_fault_not_a_hang() -> None:
    work = _Work(layers=2, groups=3)
    streamer = Streamer(work.items, work.rings(2, 2), HostQueues())
    for item in work.items[:3]:
        streamer.take(item.key)
    with pytest.raises(InternalError, match=r"all slots are in use when \(0, 2\) is needed"):
        streamer.take((0, 2))


class _Ranges:
    """Host ranges that become ready when waited for."""

    def __init__(self) -> None:
        self.num_ready = 0
        self.waited: list[int] = []

    def is_ready(self, index: int) -> bool:
        return index < self.num_ready

    def wait(self, index: int) -> None:
        if index >= self.num_ready:
            self.waited.append(index)
            self.num_ready = index + 1


def test_host_memory_is_waited_for_only_when_it_is_needed_now() -> None:
    items = [StreamItem(i, (torch.full((8,), i, dtype=torch.uint8),), 0, i // 2) for i in range(6)]
    ranges = _Ranges()
    streamer = Streamer(items, [Ring(6, 8, ring_memory(4, 8, CPU))], HostQueues(), ranges)
    streamer.prefetch()
    assert ranges.waited == []
    assert streamer.copied_bytes == 0
    for i in range(6):
        assert streamer.take(i)[0].tolist() == [i] * 8
        streamer.release()
    assert ranges.waited == [0, 1, 2]


def test_no_room_for_a_ring_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ResourceError, match=r"cpu: no room for 2 ring slots of 100 bytes; lower"):
        ring_memory(2, 100, CPU)


@pytest.mark.parametrize("seed", range(8))
def test_two_streamers_take_turns_in_one_memory(seed: int) -> None:
    """Each drops what it had copied ahead; nothing is overwritten that is still to be read."""
    works = _Work(layers=3, groups=2), _Work(layers=4, groups=3)
    queues = DeferredQueues(seed)
    memory = [ring_memory(2, 256, CPU), ring_memory(3, 1024, CPU)]
    streamers = []
    for work in works:
        counts = [sum(item.ring == ring for item in work.items) for ring in (0, 1)]
        rings = [Ring(n, b, m) for n, b, m in zip(counts, (256, 1024), memory, strict=True)]
        streamers.append(Streamer(work.items, rings, queues))
    chooser, wrong = random.Random(seed), list[object]()
    for turn in (0, 1, 1, 0, 1, 0, 0):
        if turn != chooser.randrange(2):
            queues.run_some(5)
        for streamer in streamers:
            streamer.forget()
        for item in works[turn].items:
            parts = streamers[turn].take(item.key)

            def check(parts: list[Tensor] = parts, item: StreamItem = item) -> None:
                if not all(map(torch.equal, parts, item.parts)):
                    wrong.append(item.key)

            queues.compute(check)
            streamers[turn].release()
            queues.run_some(chooser.randrange(4))
    queues.run_all()
    assert wrong == []
