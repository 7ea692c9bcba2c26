"""The catalogue, the text for Prometheus, spans of requests, stages, logs, and sampling."""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headwater.cli import stack
from headwater.cli.supervise import Supervisor
from headwater.config import TelemetryConfig, load_config
from headwater.errors import ConfigError, KvExhaustedError
from headwater.generation import FinishReason, SamplingParams, Timings, Usage
from headwater.telemetry import metrics, tracing
from headwater.telemetry.catalogue import METRICS
from headwater.telemetry.exposition import render
from headwater.telemetry.logs import HumanFormatter, JsonFormatter, configure_logging
from headwater.telemetry.metric import SERVICES
from headwater.telemetry.otlp import named, tracer_provider
from headwater.telemetry.process_facts import observe_process
from headwater.telemetry.request_span import RequestSpan
from headwater.telemetry.scrape import scrape_address, scrape_endpoint
from headwater.telemetry.stages import MAX_STAGES, Stages

DOC = Path(__file__).parents[2] / "docs" / "observability.md"
CALLER = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Takes the spans that our own helpers make."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Takes what `observe` exports."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "_meter", provider.get_meter(metrics.SCOPE))
    yield reader
    provider.shutdown()


def test_names_are_what_each_convention_wants() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metric.prometheus_name)
        # OpenTelemetry's rule for names of instruments.
        assert re.fullmatch(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}", metric.instrument_name)
        assert metric.name.startswith(("vllm:", "gen_ai.", "headwater.", "process_"))
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
    families = [metric.prometheus_name for metric in METRICS.values()]
    assert len(set(families)) == len(families)
    assert METRICS["vllm:prompt_tokens"].prometheus_name == "vllm:prompt_tokens_total"
    assert METRICS["vllm:kv_cache_usage_perc"].prometheus_name == "vllm:kv_cache_usage_perc"
    assert METRICS["headwater.dram.rate"].prometheus_name == "headwater_dram_rate_bytes_per_second"
    assert METRICS["headwater.h2d.copied"].prometheus_name == "headwater_h2d_copied_bytes_total"
    assert METRICS["gen_ai.server.request.duration"].series_names == (
        "gen_ai_server_request_duration_seconds_bucket",
        "gen_ai_server_request_duration_seconds_sum",
        "gen_ai_server_request_duration_seconds_count",
    )


def test_the_page_and_the_catalogue_agree() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$",
        DOC.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    written = {row[0]: row[1:] for row in rows}
    assert len(written) == len(rows)
    assert written == {
        metric.name: (
            metric.prometheus_name,
            metric.kind,
            ", ".join(f"`{key}`" for key in metric.attributes),
            ", ".join(metric.processes),
            metric.help,
        )
        for metric in METRICS.values()
    }


def test_text_for_prometheus(reader: InMemoryMetricReader) -> None:
    metrics.observe(
        {"vllm:kv_cache_usage_perc": lambda: 0.25}, {"model_name": 'a "model"\\ of\nmine'}
    )
    metrics.observe({"headwater.dram.read": lambda: [(3, {"node": "0"}), (4, {"node": "1"})]})
    metrics._histogram("headwater.handover.duration").record(0.015)
    metrics._histogram("headwater.handover.duration").record(99.0)
    metrics._meter.create_counter("not.ours").add(1)
    lines = render(reader.get_metrics_data()).splitlines()
    assert 'vllm:kv_cache_usage_perc{model_name="a \\"model\\"\\\\ of\\nmine"} 0.25' in lines
    assert "# TYPE headwater_dram_read_bytes_total counter" in lines
    assert 'headwater_dram_read_bytes_total{node="1"} 4' in lines
    assert "# TYPE headwater_handover_duration_seconds histogram" in lines
    assert 'headwater_handover_duration_seconds_bucket{le="0.01"} 0' in lines
    assert 'headwater_handover_duration_seconds_bucket{le="0.02"} 1' in lines
    assert 'headwater_handover_duration_seconds_bucket{le="+Inf"} 2' in lines
    assert "headwater_handover_duration_seconds_count 2" in lines
    assert "headwater_handover_duration_seconds_sum 99.015" in lines
    assert not [line for line in lines if "not_ours" in line]
    assert render(None) == ""


def test_names_over_otlp_are_the_catalogues(reader: InMemoryMetricReader) -> None:
    metrics.observe({"vllm:kv_cache_usage_perc": lambda: 0.5, "headwater.kv.leases": lambda: 2})
    data = reader.get_metrics_data()
    assert data is not None
    [resource] = named(data).resource_metrics
    [scope] = resource.scope_metrics
    assert {m.name for m in scope.metrics} == {"vllm:kv_cache_usage_perc", "headwater.kv.leases"}


def test_what_the_kernel_knows_of_this_process(reader: InMemoryMetricReader) -> None:
    observe_process("router")
    text = render(reader.get_metrics_data())
    values = dict(re.findall(r'^(process_\w+)\{service="router"\} (\S+)$', text, re.MULTILINE))
    assert float(values["process_resident_memory_bytes"]) > 10_000_000
    assert (
        0
        < float(values["process_private_memory_bytes"])
        <= float(values["process_resident_memory_bytes"])
    )
    assert float(values["process_open_fds"]) >= 3
    assert float(values["process_cpu_seconds_total"]) > 0
    assert float(values["process_start_time_seconds"]) > 1_600_000_000


def test_the_supervisor_shows_who_runs(reader: InMemoryMetricReader, tmp_path: Path) -> None:
    config = load_config(config_file=None, environ={}, assignments=[f"state.run_dir={tmp_path}"])
    stack.run_dir(config).mkdir()
    supervisor = Supervisor(config, tmp_path / "config.toml")
    supervisor.observe()
    supervisor._restarts["decode"].count += 2
    lines = render(reader.get_metrics_data()).splitlines()
    assert 'headwater_supervisor_restarts_total{process="decode"} 2' in lines
    assert 'headwater_supervisor_restarts_total{process="gateway"} 0' in lines
    assert 'headwater_supervisor_process_up{process="router"} 0' in lines


def test_the_endpoint_of_a_process() -> None:
    assert [scrape_address("127.0.0.1:9464", s)[1] for s in SERVICES] == [9464, 9465, 9466, 9467]
    assert scrape_address("[::1]:0", "decode") == ("::1", 0)
    with scrape_endpoint(("127.0.0.1", 0), lambda: "a 1\n") as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            assert reply.read() == b"a 1\n"
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30)
        missing.value.close()
        with (
            pytest.raises(ConfigError, match=r"telemetry\.prometheus_listen: cannot listen on"),
            scrape_endpoint(("127.0.0.1", port), str),
        ):
            pass


def test_calls_that_belong_to_nobody_make_no_trace(exporter: InMemorySpanExporter) -> None:
    with tracing.server_span("/headwater.v1.DecodeService/GetStatus", ()) as quiet:
        assert not quiet.is_recording()
    with tracing.server_span("/headwater.v1.RouterService/Generate", ()):
        pass
    metadata = (("traceparent", f"00-{CALLER}-{SPAN}-01"),)
    with tracing.server_span("/headwater.v1.MemoryService/ReserveKv", metadata):
        assert dict(tracing.outgoing_metadata())["traceparent"].split("-")[1] == CALLER
    root, child = exporter.get_finished_spans()
    assert root.name == "headwater.v1.RouterService/Generate"
    assert root.parent is None
    assert child.parent is not None
    assert f"{child.parent.span_id:x}" == SPAN


def test_a_failure_shows_its_class_and_not_its_words(exporter: InMemorySpanExporter) -> None:
    def fail() -> None:
        with tracing.server_span("/headwater.v1.RouterService/Generate", ()) as span:
            failure = KvExhaustedError("a secret")
            tracing.failed(span, failure, 8)
            raise failure

    with pytest.raises(KvExhaustedError):
        fail()
    [found] = exporter.get_finished_spans()
    assert found.attributes is not None
    assert found.attributes["error.type"] == "KvExhaustedError"
    assert found.attributes["rpc.grpc.status_code"] == 8
    assert found.status.status_code is trace.StatusCode.ERROR
    assert "a secret" not in found.to_json()


def test_the_ratio_counts_where_no_caller_decided() -> None:
    provider = tracer_provider("http://127.0.0.1:1", 0.0, Resource.create())
    tracer = provider.get_tracer("test")
    assert not tracer.start_span("root").is_recording()

    def child_of(flags: int) -> trace.Span:
        context = trace.SpanContext(
            int(CALLER, 16), int(SPAN, 16), is_remote=True, trace_flags=trace.TraceFlags(flags)
        )
        return tracer.start_span(
            "child", context=trace.set_span_in_context(trace.NonRecordingSpan(context))
        )

    assert child_of(1).is_recording()
    assert not child_of(0).is_recording()
    provider.shutdown()


def answer(span: RequestSpan) -> None:
    sampling = SamplingParams(temperature=0.5, max_tokens=8, seed=2**63)
    span.asked("r1", "chat", "tiny", sampling, 2)
    span.event("queued", waiting_requests=3)
    for index, reason in enumerate((FinishReason.STOP, FinishReason.LENGTH)):
        span.answered(index, reason, Usage(5, 4, 2), Timings(total_seconds=2.0))


def finished(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_the_span_of_a_request(exporter: InMemorySpanExporter) -> None:
    with tracing.server_span("/headwater.v1.RouterService/Generate", ()):
        span = RequestSpan()
        answer(span)
        assert not span.records_content
        span.close(lambda _: "never asked")
    [found] = exporter.get_finished_spans()
    attributes = finished(found)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert attributes["gen_ai.usage.output_tokens"] == 8
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.request.temperature"] == 0.5
    # OTLP's integers cannot hold it.
    assert "gen_ai.request.seed" not in attributes
    assert not [key for key in attributes if "messages" in key]
    assert [event.name for event in found.events] == ["queued", "finished", "finished"]
    assert dict(found.events[0].attributes or {}) == {"headwater.waiting_requests": 3}


def test_content_is_there_when_asked_for(exporter: InMemorySpanExporter) -> None:
    with tracing.server_span("/headwater.v1.RouterService/Generate", ()):
        span = RequestSpan(records_content=True)
        span.prompt([("user", "What?")])
        span.tokens(0, [1, 2])
        span.tokens(0, [3])
        span.answered(0, FinishReason.STOP, Usage(1, 3), Timings())
        span.close(lambda ids: f"tokens {list(ids)}")
    attributes = finished(exporter.get_finished_spans()[0])
    [asked] = json.loads(str(attributes["gen_ai.input.messages"]))
    assert asked == {"role": "user", "parts": [{"type": "text", "content": "What?"}]}
    [said] = json.loads(str(attributes["gen_ai.output.messages"]))
    assert said["parts"][0]["content"] == "tokens [1, 2, 3]"
    assert said["finish_reason"] == "stop"


def test_without_a_span_nothing_is_kept() -> None:
    span = RequestSpan(records_content=True)
    assert not span.records_content
    answer(span)
    span.close(lambda _: pytest.fail("nothing to write"))


def test_stages_become_events_at_their_times(exporter: InMemorySpanExporter) -> None:
    stages = Stages(is_kept=True)
    for number in range(MAX_STAGES + 2):
        stages.note("prefill.chunk", chunk_tokens=number)
    with tracing.span("prefill") as span:
        stages.write(span)
    ignored = Stages()
    ignored.note("prefill.chunk")
    with tracing.span("other") as span:
        ignored.write(span)
    written, nothing = exporter.get_finished_spans()
    assert [dict(e.attributes or {})["headwater.chunk_tokens"] for e in written.events][-1] == 1025
    assert all(event.timestamp < (written.start_time or 0) for event in written.events)
    assert not nothing.events


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("headwater.test", logging.INFO, "f", 1, text, arguments, None)


def test_log_lines(exporter: InMemorySpanExporter) -> None:
    human, machine = HumanFormatter(), JsonFormatter("router")
    outside = json.loads(machine.format(record("took %d", 3)))
    assert outside["message"] == "took 3"
    assert outside["service"] == "router"
    assert outside["severity"] == "INFO"
    assert outside["time"].endswith("+00:00")
    assert "trace_id" not in outside
    assert human.format(record("plain")).endswith("INFO headwater.test: plain")
    with tracing.span("work") as span:
        context = span.get_span_context()
        inside = json.loads(machine.format(record("x")))
        assert int(inside["trace_id"], 16) == context.trace_id
        assert int(inside["span_id"], 16) == context.span_id
        assert human.format(record("y")).endswith(f"[trace {context.trace_id:032x}]")
    try:
        raise ValueError("broken")
    except ValueError as failure:
        failed = record("z")
        failed.exc_info = (ValueError, failure, failure.__traceback__)
    assert "ValueError: broken" in json.loads(machine.format(failed))["exception"]


@pytest.mark.parametrize(
    ("kind", "formatter"), [("json", JsonFormatter), ("human", HumanFormatter)]
)
def test_the_setting_chooses_the_format(
    kind: str, formatter: type[logging.Formatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    kept = list(root.handlers)
    root.handlers.clear()
    configure_logging("router", TelemetryConfig(log_format=kind, log_level="debug"))  # type: ignore[arg-type]
    [handler] = root.handlers
    assert isinstance(handler.formatter, formatter)
    assert root.level == logging.DEBUG
    root.handlers[:] = kept
