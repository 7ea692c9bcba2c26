"""headwater.v1 KV and segment messages to and from headwater.kv and headwater.shm."""

from __future__ import annotations

from headwater.errors import InvalidRequestError
from headwater.kv.blocks import BlockEvent
from headwater.kv.feed import KvEventBatch
from headwater.kv.layout import LAYOUT_VERSION, KvKind, KvLayout
from headwater.kv.lease import KvLease
from headwater.kv.words import lease_word, number_of
from headwater.shm import SegmentHandle
from headwater.v1 import kv_pb2 as pb
from headwater.v1 import memory_service_pb2

_KIND_TO_PB = {KvKind.GQA: pb.KV_KIND_GQA, KvKind.MLA: pb.KV_KIND_MLA}
_KIND_FROM_PB = {value: key for key, value in _KIND_TO_PB.items()}
_LAYOUT_SIZES = (
    "num_layers",
    "num_blocks",
    "block_tokens",
    "num_kv_heads",
    "head_dim",
    "num_slots",
    "hidden_size",
)


def segment_handle_from_pb(message: pb.SegmentHandle) -> SegmentHandle:
    """The handle as a value; nothing is checked before attaching."""
    return SegmentHandle(
        name=message.name,
        total_bytes=message.total_bytes,
        epoch=message.epoch,
        layout_version=message.layout_version,
        digest=message.digest,
        owner_pid=message.owner_pid,
    )


def segment_handle_to_pb(handle: SegmentHandle) -> pb.SegmentHandle:
    """The handle as a message."""
    return pb.SegmentHandle(
        name=handle.name,
        total_bytes=handle.total_bytes,
        epoch=handle.epoch,
        layout_version=handle.layout_version,
        digest=handle.digest,
        owner_pid=handle.owner_pid,
    )


def kv_layout_from_pb(message: pb.KvLayout) -> KvLayout:
    """Raises InvalidRequestError for a kind this program does not know or a size of zero."""
    if message.kind not in _KIND_FROM_PB:
        raise InvalidRequestError("lease.layout.kind", f"unknown kind {message.kind}")
    sizes = {name: getattr(message, name) for name in _LAYOUT_SIZES}
    for name, value in sizes.items():
        if value < 1:
            raise InvalidRequestError(f"lease.layout.{name}", f"must be at least 1, got {value}")
    return KvLayout(kind=_KIND_FROM_PB[message.kind], **sizes)


def kv_layout_to_pb(layout: KvLayout) -> pb.KvLayout:
    """The layout as a message."""
    sizes = {name: getattr(layout, name) for name in _LAYOUT_SIZES}
    return pb.KvLayout(kind=_KIND_TO_PB[layout.kind], **sizes)


def kv_lease_from_pb(message: pb.KvLease) -> KvLease:
    """Raises InvalidRequestError when the lease points outside its own pool, or was altered."""
    layout = kv_layout_from_pb(message.layout)
    if message.segment.layout_version != LAYOUT_VERSION:
        raise InvalidRequestError(
            "lease.segment.layout_version",
            f"must be {LAYOUT_VERSION}, got {message.segment.layout_version}; run the same version "
            "of prefill and decode",
        )
    if message.slot >= layout.num_slots:
        raise InvalidRequestError(
            "lease.slot", f"must be below {layout.num_slots}, got {message.slot}"
        )
    for i, block in enumerate(message.block_ids):
        if block >= layout.num_blocks:
            raise InvalidRequestError(
                f"lease.block_ids[{i}]", f"must be below {layout.num_blocks}, got {block}"
            )
    word = lease_word(
        number_of(message.generation), message.slot, message.block_ids, message.cached_tokens
    )
    if message.generation != word:
        raise InvalidRequestError(
            "lease.generation",
            "is not that of slot, block_ids and cached_tokens; pass on what ReserveKv gave",
        )
    return KvLease(
        lease_id=message.lease_id,
        segment=segment_handle_from_pb(message.segment),
        layout=layout,
        slot=message.slot,
        generation=message.generation,
        block_ids=tuple(message.block_ids),
        cached_tokens=message.cached_tokens,
        ttl_ms=message.ttl_ms,
    )


def kv_lease_to_pb(lease: KvLease) -> pb.KvLease:
    """The lease as a message."""
    return pb.KvLease(
        lease_id=lease.lease_id,
        segment=segment_handle_to_pb(lease.segment),
        layout=kv_layout_to_pb(lease.layout),
        slot=lease.slot,
        generation=lease.generation,
        block_ids=lease.block_ids,
        cached_tokens=lease.cached_tokens,
        ttl_ms=lease.ttl_ms,
    )


def kv_events_to_pb(
    batch: KvEventBatch, epoch: int, block_tokens: int
) -> memory_service_pb2.WatchKvEventsResponse:
    """A batch of the pool's events as a message."""
    return memory_service_pb2.WatchKvEventsResponse(
        epoch=epoch,
        block_tokens=block_tokens,
        is_snapshot=batch.is_snapshot,
        events=[_event_to_pb(event) for event in batch.events],
    )


def kv_events_from_pb(message: memory_service_pb2.WatchKvEventsResponse) -> KvEventBatch:
    """The message as a batch; changes of a kind that this program does not know are left out."""
    events = (_event_from_pb(event) for event in message.events)
    return KvEventBatch(message.is_snapshot, tuple(event for event in events if event is not None))


def _event_to_pb(event: BlockEvent) -> memory_service_pb2.KvBlockEvent:
    if not event.is_stored:
        return memory_service_pb2.KvBlockEvent(
            removed=memory_service_pb2.KvBlockRemoved(hash=event.name)
        )
    return memory_service_pb2.KvBlockEvent(
        stored=memory_service_pb2.KvBlockStored(
            hash=event.name, parent_hash=event.parent, token_ids=event.token_ids
        )
    )


def _event_from_pb(message: memory_service_pb2.KvBlockEvent) -> BlockEvent | None:
    kind = message.WhichOneof("change")
    if kind == "stored":
        stored = message.stored
        return BlockEvent(True, stored.hash, stored.parent_hash, tuple(stored.token_ids))
    if kind == "removed":
        return BlockEvent(False, message.removed.hash)
    return None
