"""The prefix cache as a gateway sees it: its events, its flushing, and the loss of decode."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from headwater.cli.main import main
from headwater.client import Client
from headwater.rpc.channel import open_channel
from headwater.v1 import memory_service_pb2, memory_service_pb2_grpc
from tests.integration.test_generate import GREEDY, collect, make_prompt, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    import pytest

    from tests.integration.stack import Stack

# Nothing here takes long; a stream that stays silent would wait for ever.
LIMIT_SECONDS = 60


class Mirror:
    """What a gateway knows of the cache, after each batch: tokens by the hashes of their blocks."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int] = {}
        self.num_cleared = 0
        self._next_sequence_number = 0

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        if self._next_sequence_number:
            assert batch.sequence_number == self._next_sequence_number
        self._next_sequence_number = batch.sequence_number + 1
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.num_cleared += 1
                self.blocks.clear()
            elif kind == "removed":
                for block_hash in event.removed.block_hashes:
                    del self.blocks[block_hash]
            else:
                [block] = event.stored.blocks
                assert block.block_size == len(block.token_ids) == 16
                if event.stored.HasField("parent_block_hash"):
                    assert event.stored.parent_block_hash in self.blocks
                    self.parents[block.block_hash] = event.stored.parent_block_hash
                self.blocks[block.block_hash] = tuple(block.token_ids)


@asynccontextmanager
async def engine(stack: Stack) -> AsyncGenerator[vllm_engine_pb2_grpc.VllmEngineStub, None]:
    async with open_channel(stack.addresses["router"]) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def until(
    batches: AsyncIterator[common_pb2.KvEventBatch], mirror: Mirror, count: int
) -> None:
    while len(mirror.blocks) != count:
        mirror.take(await anext(batches))


async def ask(stack: Stack, prompt: tuple[int, ...]) -> int:
    """Returns how many of its tokens were cached."""
    async with Client(stack.addresses["router"]) as client:
        _, last = await collect(client.generate(prompt, GREEDY))
    assert last.usage is not None
    return last.usage.cached_tokens


async def test_events_flush_and_loss(stack: Stack) -> None:
    prompt = make_prompt(200)
    # 200 tokens of prompt and 39 of the answer's 40 have KV: 14 full blocks.
    num_blocks = (200 + 39) // 16
    async with asyncio.timeout(LIMIT_SECONDS), engine(stack) as stub:
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        # At once, before there is anything to tell.
        await call.initial_metadata()
        batches, mirror = aiter(call), Mirror()
        mirror.take(await anext(batches))
        assert (mirror.num_cleared, mirror.blocks) == (1, {})

        assert await ask(stack, prompt) == 0
        await until(batches, mirror, num_blocks)
        told = [token for tokens in mirror.blocks.values() for token in tokens]
        assert tuple(told[:200]) == prompt
        assert len(mirror.parents) == num_blocks - 1

        # Somebody who comes later is told all of it.
        late_call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        late = Mirror()
        await until(aiter(late_call), late, num_blocks)
        assert late.blocks == mirror.blocks
        late_call.cancel()

        await wait_until_idle(stack)
        assert await ask(stack, prompt) == 192
        await wait_until_idle(stack)
        reply = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
        assert (reply.success, reply.message) == (True, f"{num_blocks} blocks flushed")
        await until(batches, mirror, 0)
        assert mirror.num_cleared == 1
        assert await ask(stack, prompt) == 0
        await until(batches, mirror, num_blocks)

        # With decode its cache is lost, and the next one's is told on the same stream.
        stack.kill("decode")
        await until(batches, mirror, 0)
        assert mirror.num_cleared == 2
        await asyncio.to_thread(stack.start, "decode")
        assert await ask(stack, prompt) == 0
        await until(batches, mirror, num_blocks)
        assert mirror.num_cleared == 3
        call.cancel()


async def test_a_flush_leaves_what_is_in_use(shared_stack: Stack) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), engine(shared_stack) as stub:
        async with Client(shared_stack.addresses["router"]) as client:
            events = client.generate(make_prompt(100), GREEDY)
            await anext(events)
            reply = await stub.FlushCache(common_pb2.FlushCacheRequest())
            tokens, _ = await collect(events)
        # The request may have ended before the flush; it got its tokens in any case.
        assert reply.success or "held by requests under way" in reply.message
        assert len(tokens) >= 39
        await wait_until_idle(shared_stack)


def test_subscriptions_do_not_delay_a_stop(make_stack: Callable[..., Stack]) -> None:
    """They last for ever, so that no grace period would be long enough."""
    stack = make_stack("router.grace_seconds=3000", "decode.grace_seconds=3000")
    stack.start()
    with grpc.insecure_channel(stack.addresses["router"]) as channel:
        engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        batches = engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        next(batches)
        end(stack, "router")
        batches.cancel()
    with grpc.insecure_channel(stack.addresses["decode"]) as channel:
        memory = memory_service_pb2_grpc.MemoryServiceStub(channel)
        events = memory.WatchKvEvents(memory_service_pb2.WatchKvEventsRequest())
        assert next(events).is_snapshot
        end(stack, "decode")
        events.cancel()


def end(stack: Stack, name: str) -> None:
    process = stack.processes.pop(name)
    process.terminate()
    assert process.wait(LIMIT_SECONDS) == 0


def test_flush_by_command(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    decode = f"decode.listen={stack.addresses['decode']}"
    asyncio.run(ask(stack, make_prompt(200)))
    asyncio.run(wait_until_idle(stack))
    assert main(["shm", "flush", "--set", decode]) == 0
    assert capsys.readouterr().out == "14 blocks flushed, 0 in use\n"
    assert asyncio.run(ask(stack, make_prompt(200))) == 0
    stack.kill("decode")
    assert main(["shm", "flush", "--set", decode]) == 1
    assert "headwater shm: " in capsys.readouterr().err
