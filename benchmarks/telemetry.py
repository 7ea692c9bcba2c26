"""What does full tracing cost? Tokens per second of two stacks, one traced and one not, in turn.

`python -m benchmarks.telemetry [CHECKPOINT] [--rounds 30] [--streams 8] [--json FILE]`: both stacks
are up all the time, and take the same requests one after the other, the first of each round in
turn; a round gives a ratio, and the median of the ratios counts. After half of the rounds both are
started anew, the other one first, since a process may be lucky with its memory. The traced one
sends every span and every metric over OTLP to a receiver that counts and drops them, and serves
/metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from benchmarks.live import default_model, live_stack
from benchmarks.record import write_result

from headwater.client import Client
from headwater.generation import SamplingParams
from tests.integration.stack import Stack, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT_TOKENS = 32
ANSWER_TOKENS = 64
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Received:
    """What came to the receiver; the traced stack's only."""

    calls: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)


@contextmanager
def receiver(received: Received) -> Iterator[str]:
    """An OTLP endpoint that parses nothing; yields its URL."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            kind = "traces" if "trace" in details.method else "metrics"

            def take(data: bytes, _: grpc.ServicerContext) -> bytes:
                received.calls[kind] = received.calls.get(kind, 0) + 1
                received.num_bytes[kind] = received.num_bytes.get(kind, 0) + len(data)
                return b""

            return grpc.unary_unary_rpc_method_handler(take)

    server = grpc.server(
        futures.ThreadPoolExecutor(2),
        handlers=[Handler()],
        options=(("grpc.max_receive_message_length", -1),),
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


async def tokens_per_second(address: str, streams: int, round_number: int) -> float:
    """Of `streams` requests at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    async def one(client: Client, index: int) -> int:
        first = 1000 + 50 * (streams * round_number + index) % 40_000
        prompt = range(first, first + PROMPT_TOKENS)
        events = client.generate(tuple(prompt), sampling, objective_class="batch")
        return sum([len(event.tokens) async for event in events])

    async with Client(address) as client:
        began_at = time.monotonic()
        counts = await asyncio.gather(*(one(client, i) for i in range(streams)))
        return sum(counts) / (time.monotonic() - began_at)


def cpu_seconds(made: Stack, name: str) -> float:
    """User and system time of a process so far."""
    stat = Path(f"/proc/{made.processes[name].pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


@dataclass
class Half:
    """Both stacks' rates, round by round, and CPU seconds by process, from one start of both."""

    rates: dict[str, list[float]]
    cpu: dict[str, dict[str, float]]


def measure_half(
    checkpoint: Path, rounds: int, streams: int, folder: Path, received: Received, first: str
) -> Half:
    """One start of both stacks, `first` first."""
    with ExitStack() as stays:
        endpoint = stays.enter_context(receiver(received))
        traced = (
            f"telemetry.otlp_endpoint={endpoint}",
            f"telemetry.prometheus_listen=127.0.0.1:{free_port()}",
        )
        settings = {"off": (), "on": traced}
        stacks = {}
        for name in (first, *(settings.keys() - {first})):
            (folder / name).mkdir(parents=True)
            stacks[name] = stays.enter_context(
                live_stack(checkpoint, folder / name, *settings[name], name=name)
            )
        for made in stacks.values():
            asyncio.run(tokens_per_second(made.addresses["router"], streams, 0))
        before = _cpu(stacks)
        rates: dict[str, list[float]] = {name: [] for name in stacks}
        for number in range(1, rounds + 1):
            order = list(stacks) if number % 2 else list(reversed(stacks))
            for name in order:
                address = stacks[name].addresses["router"]
                rates[name].append(asyncio.run(tokens_per_second(address, streams, number)))
        after = _cpu(stacks)
    used = {
        name: {process: after[name][process] - before[name][process] for process in after[name]}
        for name in stacks
    }
    return Half(rates, used)


def measure(checkpoint: Path, rounds: int, streams: int, folder: Path) -> dict[str, Any]:
    """Both halves, put together."""
    received = Received()
    halves = [
        measure_half(checkpoint, rounds // 2, streams, folder / first, received, first)
        for first in ("off", "on")
    ]
    num_tokens = 2 * (rounds // 2) * streams * ANSWER_TOKENS
    rates = {name: [r for half in halves for r in half.rates[name]] for name in ("off", "on")}
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "tokens_per_second": rates,
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "cpu_ms_per_token": {
            name: {
                process: 1000 * sum(half.cpu[name][process] for half in halves) / num_tokens
                for process in halves[0].cpu[name]
            }
            for name in rates
        },
        "received": {"calls": received.calls, "bytes": received.num_bytes},
        "requests": 2 * (rounds // 2 + 1) * streams,
    }


def _cpu(stacks: dict[str, Stack]) -> dict[str, dict[str, float]]:
    return {
        name: {process: cpu_seconds(made, process) for process in made.processes}
        for name, made in stacks.items()
    }


def main() -> None:
    """Prints the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or default_model()
    with tempfile.TemporaryDirectory(prefix=f"telemetry-{os.getpid()}-") as folder:
        figures = measure(checkpoint, arguments.rounds, arguments.streams, Path(folder))
    figures["model"] = checkpoint.name
    figures["load_average"] = os.getloadavg()[0]
    low, _, high = figures["quartiles"]
    print(f"traced / untraced, tokens/s: median {figures['median_ratio']:.3f}", end=" ")
    print(f"(quartiles {low:.3f} to {high:.3f}, {arguments.rounds} rounds)")
    for name, used in figures["cpu_ms_per_token"].items():
        parts = ", ".join(f"{process} {value:.3f}" for process, value in used.items())
        print(f"{name:4} CPU ms per token: {parts}")
    print(f"received: {figures['received']} for {figures['requests']} requests")
    print(f"load average {figures['load_average']:.1f}")
    write_result(arguments.json, figures)


if __name__ == "__main__":
    main()
