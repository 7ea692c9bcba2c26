"""The KV pool: leases, expiry, epochs, and blocks that a slow writer still holds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import pytest

from headwater.errors import (
    InvalidRequestError,
    KvExhaustedError,
    LeaseError,
    PromptTooLongError,
    SegmentError,
    StaleEpochError,
)
from headwater.kv.hashing import block_hashes
from headwater.kv.layout import LAYOUT_VERSION, KvKind, KvLayout
from headwater.kv.pool import KvPool
from headwater.kv.writer import KvWriter
from headwater.shm import Lifetime, Segment, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.kv.blocks import BlockEvent
    from headwater.kv.lease import KvLease

LAYOUT = KvLayout(KvKind.GQA, 2, 8, 4, 2, 8, 4, 16)
EPOCH = 77
TTL_MS = 1000


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def segment(shm_prefix: str) -> Iterator[Segment]:
    with Segment.create(
        f"{shm_prefix}.kv",
        LAYOUT.payload_bytes,
        kind=SegmentKind.KV,
        lifetime=Lifetime.BOUND,
        epoch=EPOCH,
        layout_version=LAYOUT_VERSION,
    ) as segment:
        segment.mark_ready()
        yield segment


@pytest.fixture
def pool(segment: Segment, clock: Clock) -> KvPool:
    return KvPool(segment, LAYOUT, ttl_ms=TTL_MS, clock=clock)


@pytest.fixture
def writer(segment: Segment) -> Iterator[KvWriter]:
    writer = KvWriter(segment.handle, LAYOUT)
    yield writer
    writer.close()


def test_layout_parts_do_not_overlap() -> None:
    ends = [
        (0, LAYOUT.num_slots * 16),
        (LAYOUT.hidden_offset, LAYOUT.num_slots * LAYOUT.hidden_size * 4),
        (LAYOUT.layer_offset(0), LAYOUT.num_blocks * LAYOUT.block_bytes),
        (LAYOUT.layer_offset(1), LAYOUT.num_blocks * LAYOUT.block_bytes),
        (LAYOUT.payload_bytes, 0),
    ]
    for (start, size), (following, _) in itertools.pairwise(ends):
        assert start + size <= following
        assert following % 4096 == 0
    assert LAYOUT.block_bytes == 2 * 4 * 2 * 8 * 2


def test_blocks_are_lent_once_and_come_back(pool: KvPool) -> None:
    first = pool.reserve("a", 13, 8)
    second = pool.reserve("b", 12, 1)
    assert (len(first.block_ids), len(second.block_ids)) == (4, 3)
    assert len({*first.block_ids, *second.block_ids}) == 7
    # The last block is kept for the growth of those under way.
    with pytest.raises(KvExhaustedError, match="1 of 8 blocks"):
        pool.reserve("c", 1, 1)
    pool.release(EPOCH, [first.lease_id, 12345])
    assert pool.num_free_blocks == 5
    assert pool.reserve("c", 1, 1).generation > second.generation


def test_what_never_fits_is_an_invalid_request(pool: KvPool) -> None:
    with pytest.raises(PromptTooLongError, match="need 9 KV blocks, the pool has 8"):
        pool.reserve("a", 30, 4)


def test_slots_bound_the_leases(pool: KvPool) -> None:
    for i in range(4):
        pool.reserve(str(i), 1, 1)
    with pytest.raises(KvExhaustedError, match="all 4 lease slots"):
        pool.reserve("5", 1, 1)


def test_leases_expire_unless_renewed(pool: KvPool, clock: Clock) -> None:
    kept, lost = pool.reserve("kept", 1, 1), pool.reserve("lost", 1, 1)
    clock.now = 0.9
    assert pool.renew(EPOCH, [kept.lease_id]) == []
    clock.now = 1.1
    assert pool.renew(EPOCH, [kept.lease_id, lost.lease_id]) == [lost.lease_id]
    assert (pool.num_leases, pool.num_free_blocks) == (1, 7)


def test_other_epochs_are_refused(pool: KvPool) -> None:
    lease = pool.reserve("a", 1, 1)
    with pytest.raises(StaleEpochError, match="epoch 76"):
        pool.renew(76, [lease.lease_id])
    with pytest.raises(StaleEpochError):
        pool.pin(76, lease.lease_id, [1], 1)
    pool.release(76, [lease.lease_id])
    assert pool.num_leases == 1


def test_generation_needs_a_complete_prompt(pool: KvPool, writer: KvWriter, clock: Clock) -> None:
    lease = pool.reserve("a", 1, 1)
    with pytest.raises(LeaseError, match="not computed"):
        pool.pin(EPOCH, lease.lease_id, [1], 1)
    with writer.writing(lease):
        writer.complete(lease, [1])
    assert pool.pin(EPOCH, lease.lease_id, [1], 1) == lease
    with pytest.raises(LeaseError, match="uses it already"):
        pool.pin(EPOCH, lease.lease_id, [1], 1)
    # While generation runs, neither time nor a release from outside ends the lease.
    clock.now = 1000.0
    pool.sweep()
    pool.release(EPOCH, [lease.lease_id])
    assert pool.num_leases == 1
    pool.finish(lease)
    assert (pool.num_leases, pool.num_free_blocks) == (0, 8)


def test_completion_does_not_leak_into_the_next_lease(pool: KvPool, writer: KvWriter) -> None:
    for _ in range(LAYOUT.num_slots + 1):
        lease = pool.reserve("a", 1, 1)
        with pytest.raises(LeaseError, match="not computed"):
            pool.pin(EPOCH, lease.lease_id, [1], 1)
        with writer.writing(lease):
            writer.complete(lease, [1])
        pool.release(EPOCH, [lease.lease_id])


def test_blocks_of_a_slow_writer_stay_in_quarantine(
    pool: KvPool, writer: KvWriter, clock: Clock
) -> None:
    lease = pool.reserve("slow", 32, 1)
    with writer.writing(lease):
        clock.now = 2.0
        pool.sweep()
        assert (pool.num_leases, pool.num_free_blocks, pool.num_quarantined_blocks) == (0, 0, 8)
        with pytest.raises(KvExhaustedError):
            pool.reserve("next", 1, 1)
        with pytest.raises(LeaseError, match="expired"):
            writer.check(lease)
    assert pool.reserve("next", 1, 1)
    assert pool.num_quarantined_blocks == 0
    with pytest.raises(LeaseError, match="expired"), writer.writing(lease):
        pytest.fail("an ended lease must not be written under")


def test_one_writer_at_a_time(pool: KvPool, segment: Segment, writer: KvWriter) -> None:
    lease = pool.reserve("a", 1, 1)
    other = KvWriter(segment.handle, LAYOUT)
    with (
        writer.writing(lease),
        pytest.raises(LeaseError, match="another prefill"),
        other.writing(lease),
    ):
        pytest.fail("two writers under one lease")
    other.close()


def test_writer_and_reader_see_the_same_memory(segment: Segment, writer: KvWriter) -> None:
    reader = KvWriter(segment.handle, LAYOUT)
    writer.memory.pages.layers[1][3, 1, 2] = 5.0
    writer.memory.hidden[2] = 7.0
    assert reader.memory.pages.layers[1][3, 1, 2].sum() == 5.0 * 16
    assert reader.memory.pages.layers[0].abs().sum() == 0.0
    assert reader.memory.hidden.sum() == 7.0 * 16
    reader.close()


def test_a_stale_handle_is_refused(segment: Segment) -> None:
    with pytest.raises(SegmentError, match="epoch"):
        KvWriter(dataclasses.replace(segment.handle, epoch=EPOCH + 1), LAYOUT)


def names_of(tokens: range) -> tuple[bytes, ...]:
    return block_hashes(tokens, LAYOUT.block_tokens)


def complete(pool: KvPool, writer: KvWriter, tokens: range) -> KvLease:
    """A pinned lease whose prompt is computed and whose full blocks are named."""
    lease = pool.reserve("r", len(tokens), 1, names_of(tokens))
    with writer.writing(lease):
        writer.complete(lease, tokens)
    pool.pin(EPOCH, lease.lease_id, tokens, len(tokens))
    parent, size = b"", LAYOUT.block_tokens
    for i, name in enumerate(names_of(tokens)):
        pool.name_block(lease.block_ids[i], name, parent, tokens[i * size : (i + 1) * size])
        parent = name
    return lease


def test_a_prompt_that_starts_alike_finds_its_blocks(pool: KvPool, writer: KvWriter) -> None:
    first = complete(pool, writer, range(10))
    again = pool.reserve("again", 12, 1, names_of(range(12)))
    assert again.cached_tokens == 8
    assert again.block_ids[:2] == first.block_ids[:2]
    assert again.block_ids[2] not in first.block_ids
    # Blocks stay usable after everybody has gone.
    pool.finish(first)
    pool.release(EPOCH, [again.lease_id])
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (8, 2)
    assert pool.reserve("later", 9, 1, names_of(range(9))).cached_tokens == 8
    assert (pool.queried_tokens, pool.cached_tokens) == (10 + 12 + 9, 16)


def test_the_last_token_is_always_computed(pool: KvPool, writer: KvWriter) -> None:
    pool.finish(complete(pool, writer, range(8)))
    lease = pool.reserve("same", 8, 1, names_of(range(8)))
    assert lease.cached_tokens == 4


def test_another_start_finds_nothing(pool: KvPool, writer: KvWriter) -> None:
    pool.finish(complete(pool, writer, range(8)))
    other = (9, *range(1, 12))
    assert pool.reserve("other", 12, 1, block_hashes(other, 4)).cached_tokens == 0


def test_the_longest_unused_goes_first(pool: KvPool, writer: KvWriter) -> None:
    events: list[BlockEvent] = []
    assert pool.listen(events.append) == []
    pool.finish(complete(pool, writer, range(0, 12)))
    pool.finish(complete(pool, writer, range(100, 112)))
    pool.release(EPOCH, [pool.reserve("use", 12, 1, names_of(range(0, 12))).lease_id])
    # 6 named, 2 unnamed; 4 blocks more than the unnamed ones are needed.
    pool.release(EPOCH, [pool.reserve("big", 24, 1).lease_id])
    assert pool.reserve("old", 12, 1, names_of(range(100, 112))).cached_tokens == 0
    gone = [event.name for event in events if not event.is_stored]
    # The last block of the first chain was not used again; of a chain the end goes first.
    first, second = names_of(range(0, 12)), names_of(range(100, 112))
    assert gone[:4] == [first[2], *reversed(second)]
    stored = [event for event in events if event.is_stored]
    assert [event.parent for event in stored[:2]] == [b"", stored[0].name]
    assert stored[1].token_ids == (4, 5, 6, 7)
    pool.unlisten(events.append)


def test_growth_and_giving_up(pool: KvPool, writer: KvWriter) -> None:
    lease = complete(pool, writer, range(16))
    grown = [pool.grow(lease) for _ in range(4)]
    assert sorted([*lease.block_ids, *[b for b in grown if b is not None]]) == list(range(8))
    assert pool.grow(lease) is None
    pool.give_up_blocks(lease)
    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.num_leases) == (8, 4, 1)
    refilled = pool.refill(lease, 20, names_of(range(20)), headroom=0)
    assert refilled is not None
    assert refilled[1] == 16
    assert refilled[0][:4] == list(lease.block_ids)
    pool.finish(lease)
    assert pool.num_free_blocks == 8


def test_a_refill_without_room_changes_nothing(pool: KvPool, writer: KvWriter) -> None:
    lease = complete(pool, writer, range(16))
    pool.give_up_blocks(lease)
    other = pool.reserve("other", 16, 1)
    assert pool.refill(lease, 20, names_of(range(20)), headroom=0) is None
    assert pool.num_free_blocks == 4
    pool.release(EPOCH, [other.lease_id])
    assert pool.num_free_blocks == 8
    pool.finish(lease)


def test_a_fork_shares_full_blocks_and_copies_the_rest(
    pool: KvPool, writer: KvWriter, segment: Segment
) -> None:
    lease = pool.reserve("a", 10, 1)
    with pytest.raises(LeaseError, match="not computed"):
        pool.fork(EPOCH, lease.lease_id, 10)
    with writer.writing(lease):
        writer.memory.pages.layers[1][lease.block_ids[2]] = 3.0
        writer.memory.hidden[lease.slot] = 5.0
        writer.complete(lease, range(10))
    fork, copies = pool.fork(EPOCH, lease.lease_id, 10)
    writer.memory.copy(copies)
    assert fork.block_ids[:2] == lease.block_ids[:2]
    assert copies.blocks == ((lease.block_ids[2], fork.block_ids[2]),)
    assert (writer.memory.pages.layers[1][fork.block_ids[2]] == 3.0).all()
    assert (writer.memory.hidden[fork.slot] == 5.0).all()
    for each in (lease, fork):
        pool.finish(pool.pin(EPOCH, each.lease_id, range(10), 10))
    assert pool.num_free_blocks == 8


def test_an_answer_to_another_prompt_is_refused(pool: KvPool, writer: KvWriter) -> None:
    """Its blocks would be named after tokens that they are not of."""
    pool.finish(complete(pool, writer, range(8)))
    lease = pool.reserve("a", 10, 1, names_of(range(8)))
    assert lease.cached_tokens == 8
    with writer.writing(lease):
        writer.complete(lease, range(10))
    others = [0, 1, 2, 3, 4, 5, 6, 7, 8, 99]
    with pytest.raises(InvalidRequestError, match="prompt_token_ids: .* Prefill was given"):
        pool.pin(EPOCH, lease.lease_id, others, 10)
    for num_prefilled in (None, 10):
        with writer.writing(lease):
            writer.complete(lease, range(20, 30))
        with pytest.raises(InvalidRequestError, match="the lease was reserved for"):
            pool.pin(EPOCH, lease.lease_id, range(20, 30), num_prefilled)
    assert pool.pin(EPOCH, lease.lease_id, range(10), None) == lease


@pytest.mark.parametrize("prompt_tokens", [0, 13, 2**32 - 1])
def test_a_fork_of_what_the_lease_does_not_hold_is_refused(
    pool: KvPool, writer: KvWriter, prompt_tokens: int
) -> None:
    lease = pool.reserve("a", 10, 1)
    with writer.writing(lease):
        writer.complete(lease, range(10))
    with pytest.raises(InvalidRequestError, match="prompt_tokens: must be 1 to 12"):
        pool.fork(EPOCH, lease.lease_id, prompt_tokens)
