"""A prefill process that was stopped in the midst of a prompt writes nowhere it should not."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import grpc
import pytest

from headwater.kv.writer import KvWriter
from headwater.rpc.channel import open_channel
from headwater.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    memory_service_pb2,
    memory_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
)
from headwater.wire.kv import kv_lease_from_pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headwater.kv.lease import KvLease
    from headwater.v1 import kv_pb2
    from tests.integration.stack import Stack

PROMPT_TOKENS = 3000
# 188 blocks of 16 tokens for the prompt, 60 for another one, and some for growth.
POOL_BLOCKS = 256
PATTERN = 7.0


def paint(writer: KvWriter, lease: KvLease) -> None:
    for layer in writer.memory.pages.layers:
        layer[list(lease.block_ids)] = PATTERN


def is_painted(writer: KvWriter, lease: KvLease) -> bool:
    return all(
        bool((layer[list(lease.block_ids)] == PATTERN).all())
        for layer in writer.memory.pages.layers
    )


async def test_a_revived_prefill_leaves_the_blocks_of_others_alone(
    make_stack: Callable[..., Stack], roomy_model: Path
) -> None:
    stack = make_stack(
        "prefill.chunk_tokens=16",
        f"kv.pool_tokens={POOL_BLOCKS * 16}",
        model=roomy_model,
    )
    stack.start("decode", "prefill")
    async with (
        open_channel(stack.addresses["decode"]) as decode,
        open_channel(stack.addresses["prefill"]) as prefill,
    ):
        memory = memory_service_pb2_grpc.MemoryServiceStub(decode)
        status_of = decode_service_pb2_grpc.DecodeServiceStub(decode).GetStatus
        compute = prefill_service_pb2_grpc.PrefillServiceStub(prefill).Prefill

        async def reserve(prompt_tokens: int) -> kv_pb2.KvLease:
            request = memory_service_pb2.ReserveKvRequest(
                prompt_tokens=prompt_tokens, max_new_tokens=1
            )
            reply: memory_service_pb2.ReserveKvResponse = await memory.ReserveKv(request)
            return reply.lease

        async def until_quarantined(count: int) -> None:
            request = decode_service_pb2.GetDecodeStatusRequest()
            while (await status_of(request)).kv_quarantined_blocks != count:
                await asyncio.sleep(0.02)

        handle = await reserve(PROMPT_TOKENS)
        old = kv_lease_from_pb(handle)
        writer = KvWriter(old.segment, old.layout)
        call = compute(
            prefill_service_pb2.PrefillRequest(token_ids=[1] * PROMPT_TOKENS, lease=handle)
        )
        await anext(aiter(call))
        stack.processes["prefill"].send_signal(signal.SIGSTOP)
        # The lease ends, as it does when the router gives up, but its blocks are kept from others.
        await memory.ReleaseKv(
            memory_service_pb2.ReleaseKvRequest(epoch=old.segment.epoch, lease_ids=[old.lease_id])
        )
        await until_quarantined(len(old.block_ids))
        other = kv_lease_from_pb(await reserve(60 * 16))
        assert not {*old.block_ids} & {*other.block_ids}
        assert old.slot != other.slot
        paint(writer, other)

        stack.processes["prefill"].send_signal(signal.SIGCONT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await until_quarantined(0)
        assert is_painted(writer, other)

        # Now they are given out again, and it does not come back to them.
        heir = kv_lease_from_pb(await reserve(PROMPT_TOKENS))
        assert {*old.block_ids} & {*heir.block_ids}
        paint(writer, heir)
        third = await reserve(16)
        reply = [
            r
            async for r in compute(
                prefill_service_pb2.PrefillRequest(token_ids=[1] * 16, lease=third)
            )
        ]
        assert reply[-1].HasField("done")
        assert is_painted(writer, heir)
        writer.close()
