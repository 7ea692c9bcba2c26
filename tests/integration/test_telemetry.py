"""What leaves the processes: connected traces, the catalogue's metrics, logs; and no content."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from contextlib import aclosing, closing
from typing import TYPE_CHECKING

import openai
import pytest

from headwater.client import Client
from headwater.errors import PromptTooLongError
from headwater.generation import SamplingParams
from headwater.telemetry.catalogue import METRICS
from headwater.telemetry.metric import SERVICES
from tests.integration.collector import running_collector
from tests.integration.gateway import gateway, until_ready
from tests.integration.stack import free_port
from tests.integration.test_generate import GREEDY, collect

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headwater.generation import Usage
    from headwater.telemetry.metric import Process
    from tests.integration.collector import Collector, Span
    from tests.integration.stack import Stack

SECRET = "Zanzibar"
ROOT = "headwater.v1.RouterService/Generate"
GATEWAY_ROOT = "http_request"
# Need what this test has not: weights beyond the cache.
UNSEEN = {"headwater.dram.roofline"}


async def test_traces_metrics_and_logs(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    first_port = _free_ports()
    with running_collector() as collector:
        stack = make_stack(
            f"telemetry.otlp_endpoint={collector.address}",
            f"telemetry.prometheus_listen=127.0.0.1:{first_port}",
            "telemetry.log_format=json",
            "telemetry.log_level=debug",
        )
        stack.start()
        async with Client(stack.addresses["router"]) as client:
            await collect(client.generate(SECRET, GREEDY))
            with pytest.raises(PromptTooLongError):
                await collect(client.generate(SECRET, SamplingParams(max_tokens=10**6)))
        await _through_the_gateway(stack, tmp_path, collector)
        pages = {s: _scrape(first_port + i) for i, s in enumerate(SERVICES[:3])}
        stack.stop()  # flushes

    answered, refused = (s for s in collector.spans if s.name == ROOT)
    _check_answered(answered, collector.trace_of(answered))
    assert refused.attributes["error.type"] == "PromptTooLongError"
    [http] = _http_spans(collector)
    trace = _check_connected(http, collector.trace_of(http))
    assert {s.service for s in trace} == {
        "smg",
        *(f"headwater-{name}" for name in ("router", "prefill", "decode")),
    }
    _check_metrics(pages, collector)
    for name in SERVICES[:3]:
        # gRPC prints a traceback of its own, beside the record, for watches that a stop cuts short.
        records = [json.loads(t) for t in stack.log(name).splitlines() if t.startswith("{")]
        assert {record["service"] for record in records} == {name}
        assert {"time", "severity", "logger", "message"} <= records[0].keys()
        assert SECRET not in stack.log(name)
    assert SECRET not in collector.received


async def _through_the_gateway(stack: Stack, tmp_path: Path, collector: Collector) -> None:
    port = free_port()
    router_port = int(stack.addresses["router"].rpartition(":")[2])
    async with (
        gateway(port, router_port, tmp_path, otlp_endpoint=collector.address) as process,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        await until_ready(f"127.0.0.1:{port}", process)
        # Longer than what is in the prefix cache, so that prefill takes part.
        await client.completions.create(model="tiny", prompt=f"{SECRET} is far", max_tokens=4)
        # It sends its spans in its own time, and not at its end.
        while not _http_spans(collector):
            assert process.returncode is None, "the gateway ended"
            await asyncio.sleep(0.05)


def _http_spans(collector: Collector) -> list[Span]:
    return [s for s in collector.spans if "completions" in str(s.attributes.get("path"))]


def _check_answered(root: Span, trace: list[Span]) -> None:
    assert not root.message.parent_span_id
    _check_connected(root, trace)
    spans = {s.name: s for s in trace}
    assert set(spans) >= {
        ROOT,
        "router.queue",
        "headwater.v1.MemoryService/ReserveKv",
        "router.prefill",
        "headwater.v1.PrefillService/Prefill",
        "prefill",
        "router.decode",
        "headwater.v1.DecodeService/Generate",
        "decode",
    }
    assert root.events == [
        "tokenized",
        "queued",
        "reserved",
        "handed_over",
        "first_token",
        "finished",
    ]
    assert spans["prefill"].events == ["started", "prefill.chunk"]
    assert spans["decode"].events == ["joined_batch", "first_token"]
    attributes = root.attributes
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.usage.output_tokens"] == GREEDY.max_tokens
    assert attributes["gen_ai.usage.input_tokens"] > 0
    assert attributes["gen_ai.latency.e2e"] > attributes["gen_ai.latency.time_to_first_token"] > 0


def _check_connected(root: Span, trace: list[Span]) -> list[Span]:
    """Every span has its parent in the trace, but for the root."""
    ids = {s.message.span_id for s in trace}
    assert [s for s in trace if s.message.parent_span_id not in ids] == [root]
    return trace


def _check_metrics(pages: dict[Process, str], collector: Collector) -> None:
    for process, page in pages.items():
        expected = {m for m in METRICS.values() if process in m.processes} - {
            METRICS[name] for name in UNSEEN
        }
        families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
        assert families == {m.prometheus_name for m in expected}
        series = {name for m in expected for name in m.series_names}
        shown = {line.split("{")[0].split()[0] for line in page.splitlines() if line[0] != "#"}
        assert shown == series
        ours = {n for n in collector.metric_names[f"headwater-{process}"] if n in METRICS}
        assert ours == {m.name for m in expected}
    assert "vllm:time_to_first_token_seconds_count" in pages["router"]
    assert (
        'vllm:request_success_total{model_name="tiny",finished_reason="length"} 2'
        in (pages["router"])
    )
    assert 'headwater_requests_failed_total{error_type="PromptTooLongError"} 1' in pages["router"]


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(reply.read().decode())


def _free_ports() -> int:
    """A port that is free like the two after it, at the moment."""
    while True:
        first = free_port()
        try:
            for port in range(first, first + len(SERVICES)):
                with closing(socket.socket()) as listener:
                    listener.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


async def test_a_clients_own_metrics(shared_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded for whoever sets up a meter provider; the gen_ai.client metrics."""
    calls: list[tuple[str, Usage | None, str | None]] = []

    def record(operation: str, seconds: float, usage: Usage | None, error: str | None) -> None:
        assert seconds > 0.0
        calls.append((operation, usage, error))

    monkeypatch.setattr("headwater.client.record_client_call", record)
    async with Client(shared_stack.addresses["router"]) as client:
        _, last = await collect(client.generate("one", SamplingParams(max_tokens=3)))
        with pytest.raises(PromptTooLongError):
            await collect(client.generate("two", SamplingParams(max_tokens=10**6)))
        async with aclosing(client.generate("three", SamplingParams(max_tokens=30))) as events:
            await anext(events)
    assert calls == [
        ("text_completion", last.usage, None),
        ("text_completion", None, "PromptTooLongError"),
        ("text_completion", None, "CancelledError"),
    ]
