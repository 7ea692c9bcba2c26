"""The clients in other languages, as their README says to run them, against a live stack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from headwater.client import Client
from headwater.generation import SamplingParams
from headwater.v1 import router_service_pb2, router_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from headwater.generation import TextEvent
    from tests.integration.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "The capital of France is"
MAX_TOKENS = 6
WAIT_SECONDS = 60.0
# All that a client without Headwater installs.
CLIENT_PACKAGES = ("grpc", "google", "grpc_status", "grpc_reflection", "typing_extensions.py")


@dataclass(frozen=True)
class Program:
    """A client; `statuses` is how it names those that the tests provoke."""

    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    statuses: tuple[str, str, str] = ("INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED")
    is_generic: bool = False

    def start(self, address: str, *options: str, is_chat: bool = False) -> subprocess.Popen[str]:
        """Asks for an answer to PROMPT; of `options` the later ones win."""
        given = dict(zip(options[::2], options[1::2], strict=True))
        max_tokens = given.pop("--max-tokens", str(MAX_TOKENS))
        rest = [word for pair in given.items() for word in pair]
        if self.is_generic:
            turns = {"messages": [{"role": "user", "content": PROMPT}]}
            asked = {"chat": turns} if is_chat else {"text": PROMPT}
            sampling = {"temperature": 0, "maxTokens": int(max_tokens)}
            message = json.dumps(asked | {"sampling": sampling})
            command = [address, "headwater.v1.RouterService/Generate", message]
        else:
            command = ["--address", address, "--max-tokens", max_tokens]
            command += [*(["--chat"] if is_chat else []), PROMPT]
        return subprocess.Popen(
            [*self.command, *command, *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.environ},
            text=True,
            # Whoever runs the tests in the background of a shell has it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, address: str, *options: str, is_chat: bool = False) -> tuple[int, str, str]:
        """Exit status, output and errors."""
        with self.start(address, *options, is_chat=is_chat) as process:
            return finished(process)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of a program that ends by itself."""
    try:
        output, errors = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
    return process.returncode, output, errors


def in_order(*tools: str, remedy: str) -> None:
    """Skips the test where a tool is not installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found; {remedy}")


def node(folder: Path) -> Program:
    in_order("node", remedy="apt-get install nodejs npm")
    if not (EXAMPLES / "node" / "node_modules").is_dir():
        pytest.skip("the packages of examples/node are missing; cd examples/node; npm install")
    return Program(["node", str(EXAMPLES / "node" / "generate.js")])


def cpp(folder: Path) -> Program:
    packages = "apt-get install cmake g++ pkg-config libgrpc++-dev protobuf-compiler-grpc"
    in_order("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin", remedy=packages)
    # Kept from run to run, for it takes a while.
    build = ROOT / "build" / "examples-cpp"
    for command in (
        ["cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(build)],
        ["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)],
    ):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    statuses = tuple(
        f"status {code.value[0]}:"
        for code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
    )
    return Program([str(build / "generate")], statuses=statuses)  # type: ignore[arg-type]


def without_headwater(folder: Path) -> dict[str, str]:
    """An environment for `python -S` in which our own package cannot be found."""
    installed = Path(grpc.__file__).parents[1]
    for name in CLIENT_PACKAGES:
        (folder / name).symlink_to(installed / name)
    return {"PYTHONPATH": str(folder)}


def plain_stubs(folder: Path) -> Program:
    protos = sorted((ROOT / "proto" / "headwater" / "v1").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
    command += [f"--python_out={folder}", f"--grpc_python_out={folder}", *map(str, protos)]
    subprocess.run(command, check=True)
    script = str(EXAMPLES / "python" / "plain_stubs.py")
    return Program([sys.executable, "-S", script], without_headwater(folder))


def reflection(folder: Path) -> Program:
    script = str(EXAMPLES / "reflection" / "call.py")
    command = [sys.executable, "-S", script]
    return Program(command, without_headwater(folder), is_generic=True)


@pytest.fixture(scope="module", params=[node, cpp, plain_stubs, reflection])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    make: Callable[[Path], Program] = request.param
    return make(tmp_path_factory.mktemp(make.__name__))


@pytest.fixture
def frozen_decode(shared_stack: Stack) -> Iterator[None]:
    """decode stands still, so that no answer comes."""
    pid = shared_stack.processes["decode"].pid
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def stub_of(stack: Stack) -> AsyncIterator[router_service_pb2_grpc.RouterServiceStub]:
    async with grpc.aio.insecure_channel(stack.addresses["router"]) as channel:
        yield router_service_pb2_grpc.RouterServiceStub(channel)


async def until_busy(stack: Stack, is_busy: bool) -> None:
    """Waits until the router has a request, or none."""
    async with asyncio.timeout(WAIT_SECONDS), stub_of(stack) as stub:
        while True:
            status = await stub.GetStatus(router_service_pb2.GetRouterStatusRequest())
            if bool(status.running_requests + status.waiting_requests) == is_busy:
                return
            await asyncio.sleep(0.01)


async def expected(stack: Stack, *, is_chat: bool) -> tuple[str, TextEvent]:
    """The answer as our own client gets it: its text and its last event."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    async with Client(stack.addresses["router"]) as client:
        if is_chat:
            events = [event async for event in client.chat([("user", PROMPT)], params)]
        else:
            events = [event async for event in client.generate(PROMPT, params)]
    return "".join(event.text for event in events), events[-1]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_answer(shared_stack: Stack, program: Program, is_chat: bool) -> None:
    text, last = await expected(shared_stack, is_chat=is_chat)
    assert last.usage is not None
    assert last.finish_reason is not None
    status, output, errors = program.run(shared_stack.addresses["router"], is_chat=is_chat)
    assert (status, errors) == (0, "")
    reason = f"FINISH_REASON_{last.finish_reason.name}"
    if program.is_generic:
        messages = [json.loads(line) for line in output.splitlines()]
        assert "".join(message.get("text", "") for message in messages) == text
        assert messages[-1]["finishReason"] == reason
        assert messages[-1]["usage"]["promptTokens"] == last.usage.prompt_tokens
        assert messages[-1]["usage"]["completionTokens"] == last.usage.completion_tokens
        return
    usage = last.usage
    end = f"{reason}: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} new"
    assert output == f"{text}\n{end}\n"


def test_an_error(shared_stack: Stack, program: Program) -> None:
    status, _, errors = program.run(shared_stack.addresses["router"], "--max-tokens", "0")
    assert status == 1
    assert program.statuses[0] in errors
    assert "reason: INVALID_REQUEST\n" in errors
    assert "field: sampling.max_tokens: must be at least 1" in errors


async def test_ctrl_c(shared_stack: Stack, program: Program, frozen_decode: None) -> None:
    with program.start(shared_stack.addresses["router"]) as process:
        await until_busy(shared_stack, True)
        process.send_signal(signal.SIGINT)
        status, _, errors = finished(process)
    assert status == 1
    assert program.statuses[1] in errors
    await until_busy(shared_stack, False)


async def test_a_deadline(shared_stack: Stack, program: Program, frozen_decode: None) -> None:
    status, _, errors = program.run(shared_stack.addresses["router"], "--deadline", "1")
    assert status == 1
    assert program.statuses[2] in errors
    await until_busy(shared_stack, False)


def test_reflection_lists_the_methods(shared_stack: Stack, tmp_path: Path) -> None:
    client = reflection(tmp_path)
    result = subprocess.run(
        [*client.command, shared_stack.addresses["decode"]],
        capture_output=True,
        text=True,
        env={**os.environ, **client.environ},
        timeout=WAIT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert (
        "headwater.v1.MemoryService/GetWeights(headwater.v1.GetWeightsRequest) "
        "returns (stream headwater.v1.GetWeightsResponse)\n" in result.stdout
    )
