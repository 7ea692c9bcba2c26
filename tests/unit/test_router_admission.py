"""The line before the engines: bounds, order, waiting for room, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from headwater.errors import DeadlineError, KvExhaustedError, QueueFullError, ResourceError
from headwater.services.router.admission import Admission


def _admission(max_running: int = 1, max_waiting: int = 1, max_wait: float = 60) -> Admission:
    return Admission(max_running=max_running, max_waiting=max_waiting, max_wait_seconds=max_wait)


async def _room() -> str:
    return "room"


def _room_after(failures: int, retry_after_ms: int = 1) -> Callable[[], Awaitable[str]]:
    left = [KvExhaustedError("pool is full", retry_after_ms)] * failures

    async def reserve() -> str:
        if left:
            raise left.pop()
        return "room"

    return reserve


async def _settle() -> None:
    """Lets every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_more_than_running_and_waiting_are_refused_with_a_hint() -> None:
    admission = _admission(max_running=1, max_waiting=1)
    await admission.enter(_room, None)
    waiting = asyncio.create_task(admission.enter(_room, None))
    await _settle()
    assert (admission.num_running, admission.num_waiting) == (1, 1)
    with pytest.raises(QueueFullError, match="1 running and 1 waiting") as caught:
        await admission.enter(_room, None)
    assert caught.value.retry_after_ms >= 100
    admission.leave(0.5)
    assert await waiting == "room"
    assert (admission.num_running, admission.num_waiting) == (1, 0)


async def test_first_come_first_served() -> None:
    admission = _admission(max_running=1, max_waiting=8)
    await admission.enter(_room, None)
    order: list[int] = []

    async def wait(number: int) -> None:
        await admission.enter(_room, None)
        order.append(number)
        admission.leave(0.0)

    waiting = [asyncio.create_task(wait(number)) for number in range(5)]
    await _settle()
    admission.leave(0.0)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3, 4]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_full_pool_is_asked_again() -> None:
    admission = _admission()
    assert await admission.enter(_room_after(3), None) == "room"


async def test_room_is_asked_for_as_soon_as_a_request_leaves() -> None:
    admission = _admission(max_running=2)
    await admission.enter(_room, None)
    waiting = asyncio.create_task(admission.enter(_room_after(1, retry_after_ms=10**9), None))
    await _settle()
    assert not waiting.done()
    admission.leave(0.0)
    assert await waiting == "room"


async def test_a_request_that_waits_for_room_is_not_overtaken() -> None:
    admission = _admission(max_running=4, max_waiting=4)
    await admission.enter(_room, None)
    large = asyncio.create_task(admission.enter(_room_after(1, retry_after_ms=10**9), None))
    await _settle()
    small = asyncio.create_task(admission.enter(_room, None))
    await _settle()
    assert not small.done()
    admission.leave(0.0)
    await asyncio.gather(large, small)


async def test_deadline_while_waiting() -> None:
    admission = _admission()
    await admission.enter(_room, None)
    with pytest.raises(DeadlineError, match="router's queue"):
        await admission.enter(_room, time.monotonic() + 0.01)
    assert (admission.num_running, admission.num_waiting) == (1, 0)


async def test_nobody_waits_for_ever() -> None:
    admission = _admission(max_wait=0.01)
    with pytest.raises(ResourceError, match="no room came free"):
        await admission.enter(_room_after(10**6, retry_after_ms=10**6), None)
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_who_gives_up_leaves_the_line() -> None:
    admission = _admission(max_running=1, max_waiting=2)
    await admission.enter(_room, None)
    first = asyncio.create_task(admission.enter(_room, None))
    second = asyncio.create_task(admission.enter(_room, None))
    await _settle()
    first.cancel()
    await _settle()
    assert admission.num_waiting == 1
    admission.leave(0.0)
    assert await second == "room"


async def test_a_refusal_of_the_pool_is_passed_on() -> None:
    admission = _admission()

    async def refuse() -> str:
        raise ValueError("never fits")

    with pytest.raises(ValueError, match="never fits"):
        await admission.enter(refuse, None)
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    assert await admission.enter(_room, None) == "room"
