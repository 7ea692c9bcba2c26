"""kill -9 of each process, mid-request: the others live, nothing leaks, service returns."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from headwater.client import Client
from headwater.errors import UnavailableError
from headwater.generation import SamplingParams
from headwater.shm import list_segments
from tests.integration.test_generate import GREEDY, collect, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.stack import Stack

LONG = SamplingParams(temperature=0.0, max_tokens=440, ignore_eos=True, logprobs=0)


def segment_names(shm_prefix: str, kind: str) -> list[str]:
    return [s.name for s in list_segments(f"{shm_prefix}.") if f".{kind}." in s.name]


async def kill_while_streaming(stack: Stack, victim: str) -> list[int]:
    """Kills a process after the third token and starts it again; returns all tokens."""
    tokens: list[int] = []
    async with Client(stack.addresses["router"]) as client:
        async for event in client.generate("a long answer", LONG):
            tokens += [token.id for token in event.tokens]
            if len(tokens) >= 3 and stack.processes[victim].pid == stack.first_pids[victim]:
                stack.kill(victim)
                stack.spawn(victim)
    return tokens


@pytest.mark.parametrize("victim", ["prefill", "decode", "router"])
async def test_kill_mid_request(stack: Stack, shm_prefix: str, victim: str) -> None:
    """The caller sees every token once, unless it was the router that died."""
    weights = segment_names(shm_prefix, "weights")
    first_pool = segment_names(shm_prefix, "kv")
    async with Client(stack.addresses["router"]) as client:
        expected, _ = await collect(client.generate("a long answer", LONG))

    if victim == "router":
        with pytest.raises(UnavailableError):
            await kill_while_streaming(stack, victim)
    else:
        assert await kill_while_streaming(stack, victim) == [i for i, _ in expected]
    for name, process in stack.processes.items():
        assert process.poll() is None, f"{name} died too\n{stack.log(name)}"
        assert (process.pid == stack.first_pids[name]) == (name != victim)

    for name in ("decode", "prefill", "router"):
        stack.wait_until_serving(name)
    async with Client(stack.addresses["router"]) as client:
        after, _ = await collect(client.generate("a long answer", LONG))
    assert after == expected
    assert segment_names(shm_prefix, "weights") == weights
    pool = segment_names(shm_prefix, "kv")
    assert len(pool) == 1, "the dead owner's pool is gone"
    assert (pool == first_pool) == (victim != "decode")
    await wait_until_idle(stack)
    if victim == "decode":
        assert "re-attached" in stack.log("decode")


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_kill_while_the_prompt_is_computed(stack: Stack, victim: str) -> None:
    """The request waits for the engine to come back, and nothing is left of the first try."""
    async with Client(stack.addresses["router"]) as client:
        expected, _ = await collect(client.generate("stuck", GREEDY))
        stack.processes["prefill"].send_signal(signal.SIGSTOP)
        request = asyncio.create_task(collect(client.generate("stuck", GREEDY)))
        await wait_until_leased(stack)
        stack.kill(victim)
        stack.processes["prefill" if victim == "decode" else "decode"].send_signal(signal.SIGCONT)
        stack.spawn(victim)
        tokens, _ = await request
    assert tokens == expected
    await wait_until_idle(stack)


async def test_an_engine_that_stays_away_ends_the_request(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack("router.recovery_seconds=0.5")
    stack.start()
    stack.processes["prefill"].send_signal(signal.SIGSTOP)
    async with Client(stack.addresses["router"]) as client:
        request = asyncio.create_task(collect(client.generate("stuck", GREEDY)))
        await wait_until_leased(stack)
        stack.kill("prefill")
        with pytest.raises(UnavailableError, match="prefill"):
            await request
    await wait_until_idle(stack)


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
