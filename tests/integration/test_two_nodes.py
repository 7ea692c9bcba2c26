"""Two whole stacks behind one gateway: one is killed under load and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import openai
import pytest

from headwater.rpc.channel import open_channel
from headwater.v1 import router_service_pb2, router_service_pb2_grpc
from tests.conftest import unique_prefix
from tests.integration.gateway import gateway, until_ready
from tests.integration.stack import SERVICES, Stack, free_port

MAX_TOKENS = 200
REQUESTS = 24


@dataclass
class Answer:
    """What one caller saw."""

    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    finish_reason: str | None = None
    completion_tokens: int = 0
    error: openai.APIError | None = None


@pytest.fixture
def nodes(roomy_model: Path, tmp_path: Path) -> Iterator[list[Stack]]:
    """Two running stacks that share nothing but the machine."""
    with contextlib.ExitStack() as exits:
        stacks = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            prefix = exits.enter_context(unique_prefix())
            stack = Stack(roomy_model, prefix, tmp_path / name, ["kv.pool_tokens=16384"])
            exits.callback(stack.stop)
            stacks.append(stack)
        for stack in stacks:
            for service in SERVICES:
                stack.spawn(service)
        for stack in stacks:
            for service in SERVICES:
                stack.wait_until_serving(service)
        yield stacks


@contextlib.asynccontextmanager
async def client_of(nodes: list[Stack], log_dir: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of one gateway before all nodes; it does not retry itself."""
    ports = [int(node.addresses["router"].rpartition(":")[2]) for node in nodes]
    port = free_port()
    async with gateway(port, ports[0], log_dir, *ports[1:]) as process:
        await until_ready(f"127.0.0.1:{port}", process)
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0
        ) as client:
            yield client


async def ask(
    client: openai.AsyncOpenAI, number: int, answer: Answer, *, is_streamed: bool
) -> None:
    """Fills `answer`; an error of the API is a result, too."""
    messages = [{"role": "user", "content": f"{number} times: say it again. " * 8}]
    options = {"model": "tiny", "max_tokens": MAX_TOKENS, "extra_body": {"ignore_eos": True}}
    try:
        if not is_streamed:
            reply = await client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
            answer.finish_reason = reply.choices[0].finish_reason
            answer.completion_tokens = reply.usage.completion_tokens
            return
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        async for chunk in stream:
            for choice in chunk.choices:
                # The gateway sends its first chunk, the role's, with the first token.
                answer.has_begun.set()
                answer.finish_reason = choice.finish_reason or answer.finish_reason
            if chunk.usage:
                answer.completion_tokens = chunk.usage.completion_tokens
    except openai.APIError as error:
        answer.error = error


async def status_of(node: Stack) -> router_service_pb2.GetRouterStatusResponse:
    """What the node's router says of itself."""
    async with open_channel(node.addresses["router"]) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        status: router_service_pb2.GetRouterStatusResponse = await stub.GetStatus(
            router_service_pb2.GetRouterStatusRequest()
        )
    return status


async def until_both_work(nodes: list[Stack], answers: list[Answer]) -> None:
    """Returns once both nodes have requests in work and an answer has begun."""
    while not any(answer.has_begun.is_set() for answer in answers) or not all(
        [(await status_of(node)).running_requests for node in nodes]
    ):
        await asyncio.sleep(0.005)


async def test_a_lost_node_loses_no_request_that_had_not_begun(
    nodes: list[Stack], tmp_path: Path
) -> None:
    async with client_of(nodes, tmp_path) as client, asyncio.TaskGroup() as tasks:
        answers = [Answer() for _ in range(REQUESTS)]
        asking = [
            tasks.create_task(ask(client, number, answer, is_streamed=number % 2 == 0))
            for number, answer in enumerate(answers)
        ]
        async with asyncio.timeout(60):
            await until_both_work(nodes, answers)
        running = [(await status_of(node)).running_requests for node in nodes]
        # The first of the pair is the one with more to lose.
        lost, kept = sorted(nodes, key=lambda node: -running[nodes.index(node)])
        had_begun = [answer.has_begun.is_set() for answer in answers]
        for service in ("router", "prefill", "decode"):
            lost.kill(service)
        late = [Answer() for _ in range(4)]
        asking += [
            tasks.create_task(ask(client, REQUESTS + number, answer, is_streamed=number % 2 == 0))
            for number, answer in enumerate(late)
        ]
        await asyncio.gather(*asking)
        broken = [number for number, answer in enumerate(answers) if answer.error]
        print(f"in work before the loss: {running}; begun {sum(had_begun)}; broken {broken}")
        assert len(broken) <= max(running)
        for answer, may_break in zip(answers + late, had_begun + [False] * 4, strict=True):
            if answer.error is None:
                assert answer.finish_reason == "length"
                assert answer.completion_tokens == MAX_TOKENS
            else:
                # What has begun cannot be sent again, and its caller is told.
                assert may_break or answer.has_begun.is_set(), answer.error
        assert (await status_of(kept)).finished_requests >= REQUESTS // 2
        await used_again(client, lost)


async def used_again(client: openai.AsyncOpenAI, node: Stack) -> None:
    """Starts a node once more and asks until the gateway sends it something."""
    await asyncio.to_thread(node.start)
    async with asyncio.timeout(60):
        for number in range(10_000):
            answer = Answer()
            await ask(client, 1000 + number, answer, is_streamed=False)
            assert answer.error is None
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await status_of(node)).finished_requests:
                    return
