"""Server streams as they are read here, against a real server in this process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from headwater.rpc.streams import received

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_WATCHDOG_SECONDS = 30.0


class Counting:
    """Counts up for ever, or to what the request says, and knows whether it was told to stop."""

    def __init__(self) -> None:
        self.sent = 0
        self.was_cancelled = asyncio.Event()

    async def count(self, request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        """Fails with ABORTED after 3 messages when the request is "fail"."""
        try:
            last = 3 if request == b"fail" else int(request or b"1000000000")
            for number in range(last):
                yield str(number).encode()
                self.sent += 1
            if request == b"fail":
                await context.abort(grpc.StatusCode.ABORTED, "as asked")
        finally:
            self.was_cancelled.set()


@pytest.fixture
async def counting() -> AsyncGenerator[tuple[Counting, Any], None]:
    """The servicer, and its method on an open channel."""
    servicer, server = Counting(), grpc.aio.server()
    method: Any = grpc.unary_stream_rpc_method_handler(servicer.count)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Counting", {"Count": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, channel.unary_stream("/test.Counting/Count")
    await server.stop(None)


async def test_all_messages_come_in_order(counting: tuple[Counting, Any]) -> None:
    _, count = counting
    assert [int(each) async for each in received(count(b"100"))] == list(range(100))


async def test_failure_comes_after_the_messages_before_it(counting: tuple[Counting, Any]) -> None:
    _, count = counting
    messages = received(count(b"fail"))
    assert [int(await anext(messages)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(grpc.aio.AioRpcError, match="as asked"):
        await anext(messages)


async def test_closing_it_cancels_the_call(counting: tuple[Counting, Any]) -> None:
    servicer, count = counting
    call = count(b"")
    async with aclosing(received(call)) as messages:
        assert await anext(messages) == b"0"
    assert call.cancelled()
    await asyncio.wait_for(servicer.was_cancelled.wait(), _WATCHDOG_SECONDS)


async def test_cancelled_reader_leaves_no_read_under_way(counting: tuple[Counting, Any]) -> None:
    _, count = counting
    before = asyncio.all_tasks()
    call = count(b"")
    first = asyncio.Event()

    async def read() -> None:
        async with aclosing(received(call)) as messages:
            async for _ in messages:
                first.set()

    reader = asyncio.create_task(read())
    await asyncio.wait_for(first.wait(), _WATCHDOG_SECONDS)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert call.cancelled()
    assert {task for task in asyncio.all_tasks() - before if "_read" in repr(task)} == set()


class Endless:
    """A call whose messages are there at once, until it is cancelled."""

    def __init__(self) -> None:
        self.read = 0
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        while not self._is_cancelled:
            self.read += 1
            yield self.read

    def cancel(self) -> None:
        """The next read is the last."""
        self._is_cancelled = True


async def test_no_more_is_read_than_is_wanted() -> None:
    """Messages that nobody takes stay in gRPC, whose flow control then stops the server."""
    call: Any = Endless()
    async with aclosing(received(call)) as messages:
        assert await anext(messages) == 1
        for _ in range(1000):
            await asyncio.sleep(0)
        assert call.read <= 20
        assert [await anext(messages) for _ in range(100)] == list(range(2, 102))
