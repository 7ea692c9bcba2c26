"""One trace spans router, prefill and decode; metrics arrive; both at a real OTLP endpoint."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from headwater.client import Client
from tests.integration.test_generate import GREEDY, collect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.stack import Stack


class Collector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.metric_names: set[str] = set()
        self.changed = threading.Condition()
        self.address = ""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self.changed:
            if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
                for resource in request.resource_spans:
                    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        self.spans += [(attributes["service.name"], s) for s in scope.spans]
                reply: Any = trace_service_pb2.ExportTraceServiceResponse()
            else:
                for resource in request.resource_metrics:
                    for scope in resource.scope_metrics:
                        self.metric_names |= {metric.name for metric in scope.metrics}
                reply = metrics_service_pb2.ExportMetricsServiceResponse()
            self.changed.notify_all()
            return reply


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.address = f"http://127.0.0.1:{port}"
    server.start()
    yield collector
    server.stop(0)


async def test_one_trace_spans_all_processes(
    make_stack: Callable[..., Stack], collector: Collector
) -> None:
    stack = make_stack(f"telemetry.otlp_endpoint={collector.address}")
    stack.start()
    async with Client(stack.addresses["router"]) as client:
        await collect(client.generate("traced", GREEDY))
    stack.stop()  # flushes

    roots = [s for _, s in collector.spans if s.name == "headwater.v1.RouterService/Generate"]
    assert len(roots) == 1
    mine = [(service, s) for service, s in collector.spans if s.trace_id == roots[0].trace_id]
    assert {service for service, _ in mine} == {
        "headwater-router",
        "headwater-prefill",
        "headwater-decode",
    }
    names = {s.name for _, s in mine}
    assert {
        "headwater.v1.MemoryService/ReserveKv",
        "headwater.v1.PrefillService/Prefill",
        "headwater.v1.DecodeService/Generate",
        "prefill",
        "decode",
    } <= names
    ids = {s.span_id for _, s in mine}
    orphans = [s.name for _, s in mine if s.parent_span_id and s.parent_span_id not in ids]
    assert orphans == []
    assert not roots[0].parent_span_id
    assert {
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.request.duration",
        "headwater.generation_tokens",
        "headwater.slo.finished",
        "headwater.slo.attained",
        "headwater.decode.step_seconds",
        "headwater.kv.free_blocks",
        "headwater.prefill.running_requests",
    } <= collector.metric_names
