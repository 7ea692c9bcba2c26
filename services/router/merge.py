"""Several asynchronous generators as one, in the order in which they yield."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yields what the streams yield; the first failure, or closing this one, ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    items: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, items)) for stream in streams]
    try:
        for _ in streams:
            while (arrived := await items.get()) is not None:
                if isinstance(arrived, BaseException):
                    raise arrived
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _pump(
    stream: AsyncGenerator[Item, None], items: asyncio.Queue[Item | BaseException | None]
) -> None:
    try:
        async with aclosing(stream) as open_stream:
            async for item in open_stream:
                items.put_nowait(item)
        items.put_nowait(None)
    except Exception as failure:
        items.put_nowait(failure)
