"""What the prefix cache tells: in order, complete, and never more than a listener can hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headwater.kv.blocks import BlockEvent, BlockTable
from headwater.kv.feed import MAX_BATCH, KvEventFeed
from headwater.wire.kv import kv_events_from_pb, kv_events_to_pb
from headwater.wire.vllm_kv import KvEventWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.kv.feed import KvEventBatch


class FakePool:
    """Says what it is told to."""

    def __init__(self, stored: int = 0) -> None:
        self.listeners: list[Callable[[BlockEvent], None]] = []
        self.held = [stored_event(i) for i in range(stored)]

    def listen(self, listener: Callable[[BlockEvent], None]) -> list[BlockEvent]:
        self.listeners.append(listener)
        return list(self.held)

    def unlisten(self, listener: Callable[[BlockEvent], None]) -> None:
        self.listeners.remove(listener)

    def say(self, event: BlockEvent) -> None:
        self.held.append(event)
        for listener in self.listeners:
            listener(event)


def stored_event(i: int) -> BlockEvent:
    return BlockEvent(True, i.to_bytes(16, "little"), b"", (i,))


async def take(feed: KvEventFeed, count: int) -> list[KvEventBatch]:
    async with asyncio.timeout(10):
        return [await feed.next() for _ in range(count)]


async def test_a_snapshot_comes_first_even_when_empty() -> None:
    pool = FakePool()
    with KvEventFeed(pool) as feed:  # type: ignore[arg-type]
        [first] = await take(feed, 1)
        assert (first.is_snapshot, first.events) == (True, ())
        # From a thread, as the engine does.
        await asyncio.to_thread(pool.say, stored_event(1))
        [second] = await take(feed, 1)
        assert (second.is_snapshot, second.events) == (False, (stored_event(1),))
    assert pool.listeners == []


async def test_a_long_snapshot_is_cut() -> None:
    pool = FakePool(stored=2 * MAX_BATCH + 1)
    with KvEventFeed(pool) as feed:  # type: ignore[arg-type]
        batches = await take(feed, 3)
    assert [batch.is_snapshot for batch in batches] == [True, False, False]
    assert [event for batch in batches for event in batch.events] == pool.held


async def test_a_slow_listener_starts_anew() -> None:
    pool = FakePool(stored=1)
    with KvEventFeed(pool, max_pending=4) as feed:  # type: ignore[arg-type]
        await take(feed, 1)
        for i in range(10, 16):
            pool.say(stored_event(i))
        [again] = await take(feed, 1)
        assert again.is_snapshot
        assert list(again.events) == pool.held
        pool.say(stored_event(20))
        [later] = await take(feed, 1)
        assert later.events == (stored_event(20),)
        assert len(pool.listeners) == 1


def test_a_parent_that_came_back_is_told_before_its_child() -> None:
    table = BlockTable(4)
    parent, other, child = table.take(3)
    table.name(parent, b"p", b"", (1,))
    table.name(child, b"c", b"p", (2,))
    table.drop([parent])
    assert table.flush() == 1
    table.name(other, b"p", b"", (1,))
    assert [event.name for event in table.stored()] == [b"p", b"c"]
    assert (table.num_named, table.num_kept) == (2, 0)
    table.drop([other, child])
    assert (table.flush(), table.num_named, table.stored()) == (2, 0, [])


async def test_wire_forms() -> None:
    pool = FakePool(stored=1)
    with KvEventFeed(pool) as feed:  # type: ignore[arg-type]
        pool.say(BlockEvent(False, b"\xff" * 16))
        pool.say(BlockEvent(True, b"\x02" * 16, b"\x01" * 16, (7, 8)))
        [batch] = await take(feed, 1)
    message = kv_events_to_pb(batch, epoch=5, block_tokens=2)
    assert (message.epoch, message.block_tokens) == (5, 2)
    assert kv_events_from_pb(message) == batch

    writer = KvEventWriter(first_sequence_number=0)
    written = writer.write(batch, block_tokens=2)
    assert (written.sequence_number, written.snapshot.count) == (1, 1)
    kinds = [event.WhichOneof("data") for event in written.events]
    assert kinds == ["cleared", "stored", "removed", "stored"]
    assert [event.event_id for event in written.events] == [1, 2, 3, 4]
    last = written.events[3].stored
    assert last.parent_block_hash == 0x0101010101010101
    assert (list(last.blocks[0].token_ids), last.blocks[0].block_size) == ([7, 8], 2)
    assert not written.events[1].stored.HasField("parent_block_hash")
    assert list(written.events[2].removed.block_hashes) == [-1]
    assert writer.write(batch, block_tokens=2).sequence_number == 2
