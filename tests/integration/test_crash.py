"""kill -9 of each process, mid-request: the others live, nothing leaks, service returns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from headwater.client import Client
from headwater.errors import HeadwaterError, UnavailableError
from headwater.generation import SamplingParams
from headwater.shm import list_segments
from tests.integration.test_generate import GREEDY, collect, wait_until_idle

if TYPE_CHECKING:
    from tests.integration.stack import Stack

LONG = SamplingParams(temperature=0.0, max_tokens=440, ignore_eos=True)


def segment_names(shm_prefix: str, kind: str) -> list[str]:
    return [s.name for s in list_segments(f"{shm_prefix}.") if f".{kind}." in s.name]


async def kill_while_streaming(stack: Stack, victim: str) -> HeadwaterError | None:
    """Kills a process after the third token; returns the caller's error, None for an answer."""
    async with Client(stack.addresses["router"]) as client:
        seen = 0
        try:
            async for event in client.generate("a long answer", LONG):
                seen += len(event.tokens)
                if seen >= 3 and victim in stack.processes:
                    stack.kill(victim)
        except HeadwaterError as error:
            return error
        assert seen == 440
        return None


@pytest.mark.parametrize("victim", ["prefill", "decode", "router"])
async def test_kill_mid_request(stack: Stack, shm_prefix: str, victim: str) -> None:
    weights = segment_names(shm_prefix, "weights")
    first_pool = segment_names(shm_prefix, "kv")
    async with Client(stack.addresses["router"]) as client:
        before, _ = await collect(client.generate("same before and after", GREEDY))

    error = await kill_while_streaming(stack, victim)
    if victim == "prefill":
        assert error is None, "the prompt was computed, so the answer goes on"
    else:
        assert isinstance(error, UnavailableError)
        assert victim in str(error) or victim == "router"
    for name, process in stack.processes.items():
        assert process.poll() is None, f"{name} died too\n{stack.log(name)}"

    stack.start(victim)
    stack.wait_until_serving("router")
    async with Client(stack.addresses["router"]) as client:
        after, _ = await collect(client.generate("same before and after", GREEDY))
    assert after == before
    assert segment_names(shm_prefix, "weights") == weights
    pool = segment_names(shm_prefix, "kv")
    assert len(pool) == 1, "the dead owner's pool is gone"
    assert (pool == first_pool) == (victim != "decode")
    await wait_until_idle(stack)
    if victim == "decode":
        assert "re-attached" in stack.log("decode")


async def test_kill_prefill_while_it_computes(stack: Stack) -> None:
    """The caller gets a clear status and the blocks come back."""
    import signal

    stack.processes["prefill"].send_signal(signal.SIGSTOP)
    async with Client(stack.addresses["router"]) as client:
        request = asyncio.create_task(collect(client.generate("stuck", GREEDY)))
        await wait_until_leased(stack)
        stack.kill("prefill")
        with pytest.raises(UnavailableError, match="prefill"):
            await request
        await wait_until_idle(stack)
        stack.start("prefill")
        stack.wait_until_serving("router")
        tokens, _ = await collect(client.generate("again", GREEDY))
        assert len(tokens) == 40


async def wait_until_leased(stack: Stack) -> None:
    """Returns once a request holds a lease."""
    from headwater.rpc.channel import open_channel
    from headwater.v1 import decode_service_pb2, decode_service_pb2_grpc

    async with open_channel(stack.addresses["decode"]) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        request = decode_service_pb2.GetDecodeStatusRequest()
        while (await stub.GetStatus(request)).kv_leases == 0:
            await asyncio.sleep(0.01)


async def test_all_killed_leaves_only_the_weights(stack: Stack, shm_prefix: str) -> None:
    from headwater.shm import reap

    for name in list(stack.processes):
        stack.kill(name)
    reap(f"{shm_prefix}.")
    assert segment_names(shm_prefix, "kv") == []
    assert len(segment_names(shm_prefix, "weights")) == 1
    stack.start()
    async with Client(stack.addresses["router"]) as client:
        tokens, _ = await collect(client.generate("back", GREEDY))
    assert len(tokens) == 40
    assert "re-attached" in stack.log("decode")
