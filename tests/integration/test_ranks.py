"""A stack whose prompts several ranks compute together, on CPUs: answers, and a rank that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.client import Client
from headwater.rpc.channel import open_blocking_channel
from headwater.shm import list_segments
from headwater.v1 import prefill_service_pb2 as pb
from headwater.v1 import prefill_service_pb2_grpc
from tests.integration.stack import Stack
from tests.integration.test_generate import GREEDY, collect

PROMPT = "a prompt that is not short " * 8


@pytest.fixture
def stack(tiny_model: Path, shm_prefix: str, tmp_path: Path) -> Iterator[Stack]:
    settings = ["gpu.prefill=on", "gpu.prefill_devices=cpu, cpu", "gpu.decode=off"]
    running = Stack(tiny_model, shm_prefix, tmp_path, settings)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def _status(stack: Stack) -> pb.GetPrefillStatusResponse:
    with open_blocking_channel(stack.addresses["prefill"]) as channel:
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        status: pb.GetPrefillStatusResponse = stub.GetStatus(pb.GetPrefillStatusRequest())
        return status


def _ranks(stack: Stack) -> list[int]:
    """Process ids of prefill's children, in their order."""
    prefill = stack.processes["prefill"].pid
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == prefill:
                found.append(int(entry.name))
    return sorted(found)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


async def test_a_rank_that_is_killed_in_a_sweep_loses_no_request(
    stack: Stack, shm_prefix: str
) -> None:
    prefill = stack.processes["prefill"].pid
    async with Client(stack.addresses["router"]) as client:
        expected, _ = await collect(client.generate(PROMPT, GREEDY))
        status = _status(stack)
        assert {way.gpus for way in status.ways} == {1, 2}
        assert status.h2d_bytes > 0
        segments, descriptors = list_segments(f"{shm_prefix}."), _descriptors(prefill)
        ranks = _ranks(stack)
        assert len(ranks) == 2

        # Both ways need the first: stopped, it holds the sweep until it is killed.
        os.kill(ranks[0], signal.SIGSTOP)
        asking = asyncio.create_task(collect(client.generate("Another one. " + PROMPT, GREEDY)))
        while _status(stack).running_requests == 0:
            await asyncio.sleep(0.01)
        os.kill(ranks[0], signal.SIGKILL)
        found, _ = await asking
        assert len(found) == len(expected)
        status = _status(stack)
        assert status.lost_ranks == 1
        assert status.pid == prefill
        assert f"(pid {ranks[0]}) died; its prompts are given up" in stack.log("prefill")
        assert len(_ranks(stack)) == 2
        assert set(_ranks(stack)).isdisjoint(ranks)
        again, _ = await collect(client.generate(PROMPT, GREEDY))
        # Together and alone ranks add in different orders; which way it goes is a matter of time.
        assert again[0][1] == pytest.approx(expected[0][1], abs=0.05)
    async with asyncio.timeout(60):
        # Connections close when they like.
        while _descriptors(prefill) > descriptors:
            await asyncio.sleep(0.05)
    assert [s.name for s in list_segments(f"{shm_prefix}.")] == [s.name for s in segments]

    ranks = _ranks(stack)
    stack.kill("prefill")
    # Nobody else ends them.
    for rank in ranks:
        descriptor = _open_process(rank)
        if descriptor is not None:
            await asyncio.to_thread(_wait_for, descriptor)


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _wait_for(descriptor: int) -> None:
    import select

    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    assert waiting.poll(60_000), "a rank outlives the prefill process"
    os.close(descriptor)
