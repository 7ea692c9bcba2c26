"""The prefix cache's events in the gateway's protocol (smg.grpc.common).

That protocol names blocks with 64 bits; ours have 128, of which the first half is taken. A gateway
chooses a worker by them, nothing more: a collision costs time, not truth.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2 as pb

if TYPE_CHECKING:
    from headwater.kv.blocks import BlockEvent
    from headwater.kv.feed import KvEventBatch


class KvEventWriter:
    """Numbers the batches and events of one subscription, from `first_sequence_number` on."""

    def __init__(self, first_sequence_number: int) -> None:
        # Zero stands for "none yet" there.
        self._next_sequence_number = max(1, first_sequence_number)
        self._last_event_id = 0

    def write(self, batch: KvEventBatch, block_tokens: int) -> pb.KvEventBatch:
        """The batch as a message; a snapshot starts with the end of all that was known."""
        message = pb.KvEventBatch(
            sequence_number=self._next_sequence_number, timestamp=time.time(), dp_rank=0
        )
        self._next_sequence_number += 1
        if batch.is_snapshot:
            message.snapshot.CopyFrom(
                pb.KvSnapshotChunk(index=0, count=1, blocks=len(batch.events))
            )
            self._add(message).cleared.SetInParent()
        for event in batch.events:
            if event.is_stored:
                self._add(message).stored.CopyFrom(_stored(event, block_tokens))
            else:
                self._add(message).removed.block_hashes.append(_hash(event.name))
        return message

    def _add(self, message: pb.KvEventBatch) -> pb.KvCacheEvent:
        self._last_event_id += 1
        return message.events.add(event_id=self._last_event_id)


def _stored(event: BlockEvent, block_tokens: int) -> pb.KvBlocksStored:
    block = pb.KvBlock(
        block_hash=_hash(event.name), token_ids=event.token_ids, block_size=block_tokens
    )
    return pb.KvBlocksStored(
        blocks=[block], parent_block_hash=_hash(event.parent) if event.parent else None
    )


def _hash(name: bytes) -> int:
    return int.from_bytes(name[:8], "little", signed=True)
