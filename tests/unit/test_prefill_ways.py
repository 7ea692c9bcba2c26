"""On how many GPUs a pass is computed: as measured, and one less while decode needs one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headwater.services.prefill import decode_watch
from headwater.services.prefill import ways as ways_module
from headwater.services.prefill.copy_share import CopyShare
from headwater.services.prefill.decode_watch import DecodeWatch
from headwater.services.prefill.ways import PassWays


class _Clock:
    """Stands in for the module's time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(ways_module, "time", clock)
    return clock


def _two_ways() -> PassWays:
    """Together a pass takes half as long; alone, one may have more tokens, as memory allows."""
    ways = PassWays(2048)
    ways.offer({1: 60_000, 2: 20_000})
    for tokens in (1, 64) * 4:
        ways.observe_made_up(1, tokens, 12.0 + tokens * 1e-4)
        ways.observe_made_up(2, tokens, 6.5 + tokens * 1e-4)
    return ways


def test_one_way_is_always_taken() -> None:
    ways = PassWays(2048)
    assert (ways.choose(5), ways.pass_tokens, ways.num_shared) == (1, 2048, 0)
    ways.leaves_one_to_decode = True
    ways.note_decode(is_at_work=True)
    assert ways.choose(5) == 1


def test_what_is_not_measured_is_tried() -> None:
    ways = PassWays(2048)
    ways.offer({1: 64, 2: 64})
    assert ways.choose(10) == 2
    ways.observe(10, 1.0)
    assert ways.choose(10) == 1
    ways.observe(10, 2.0)
    assert ways.choose(10) == 2


def test_the_way_that_takes_less_time_for_all_that_waits_is_taken() -> None:
    ways = _two_ways()
    assert ways.choose(10_000) == 2
    assert ways.pass_tokens == 20_000
    # Two passes alone against five together.
    assert ways.choose(100_000) == 1
    assert ways.pass_tokens == 60_000
    assert ways.costs.seconds_per_pass == pytest.approx(12.0, rel=0.01)


def test_a_way_that_was_slow_once_comes_back(clock: _Clock) -> None:
    ways = PassWays(2048)
    ways.offer({1: 60_000, 2: 60_000})
    ways.observe_made_up(1, 64, 12.0)
    ways.observe_made_up(2, 64, 13.0)
    # It fails when it is tried again, which says nothing of its speed, and later does not.
    for seconds in (None, 6.0):
        for _ in range(256):
            assert ways.choose(64) == 1
            ways.observe(64, 12.0)
        ways.leaves_one_to_decode = True
        ways.note_decode(is_at_work=True)
        assert ways.choose(64) == 1
        clock.now += 3.0
        assert ways.choose(64) == 2
        if seconds is not None:
            ways.observe(64, seconds)
    assert ways.choose(64) == 2


def test_decode_keeps_its_gpu_while_it_is_at_work_and_a_moment_longer(clock: _Clock) -> None:
    ways = _two_ways()
    ways.note_decode(is_at_work=True)
    assert ways.choose(10_000) == 2, "decode computes on a CPU, or on a GPU of its own"
    ways.leaves_one_to_decode = True
    assert ways.choose(10_000) == 1
    clock.now += 1.0
    ways.note_decode(is_at_work=False)
    assert ways.choose(10_000) == 1
    clock.now += 1.5
    assert ways.choose(10_000) == 2
    ways.count()
    assert ways.num_shared == 1


class _Attachment:
    """Answers with what it was given, then says no more."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.is_done = asyncio.Event()

    async def decode_status(self, seconds: float) -> Any:
        assert seconds < 60
        if not self.answers:
            self.is_done.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _status(running: int) -> Any:
    return SimpleNamespace(
        uses_gpu=True, running_requests=running, steps=0, busy_seconds=0.0, pending_extend_tokens=0
    )


class _Models:
    """Notes the shares it was given."""

    num_gpus = 1

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared_with_decode = is_shared
        self.shares: list[float] = []

    def share_copies(self, share: float) -> None:
        self.shares.append(share)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_prefill_learns_what_decode_does(
    clock: _Clock, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_watch, "_INTERVAL_SECONDS", 0.0)
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
    )
    attachment = _Attachment(
        _status(0),
        _status(2),
        lost,
        _status(3),
        "no status",
        _status(1),
    )
    ways, models = _two_ways(), _Models(is_shared=is_shared)
    watch = DecodeWatch(attachment, ways, models, CopyShare(0.6), bool)  # type: ignore[arg-type]
    watching = asyncio.create_task(watch.watch_forever())
    await asyncio.wait_for(attachment.is_done.wait(), 30)
    watching.cancel()
    assert models.shares == [1.0, 0.6, 1.0, 0.6, 1.0, 0.6]
    assert ways.choose(10_000) == (1 if is_shared else 2)
