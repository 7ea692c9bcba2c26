"""An OTLP endpoint for tests: keeps the spans and the names of the metrics that it is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """A span and the service that sent it."""

    service: str
    message: Any

    @property
    def name(self) -> str:
        return str(self.message.name)

    @property
    def events(self) -> list[str]:
        """Names, in the order of their times."""
        ordered = sorted(self.message.events, key=lambda event: event.time_unix_nano)
        return [event.name for event in ordered]

    @property
    def attributes(self) -> dict[str, Any]:
        return {a.key: _value(a.value) for a in self.message.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


class Collector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Collects; `received` holds everything as text, to search it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metric_names: dict[str, set[str]] = {}
        self.received = ""
        self._lock = threading.Lock()
        self.address = ""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            self.received += str(request)
            if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
                for resource in request.resource_spans:
                    service = _service_of(resource)
                    for scope in resource.scope_spans:
                        self.spans += [Span(service, message) for message in scope.spans]
                return trace_service_pb2.ExportTraceServiceResponse()
            for resource in request.resource_metrics:
                names = self.metric_names.setdefault(_service_of(resource), set())
                for scope in resource.scope_metrics:
                    names |= {metric.name for metric in scope.metrics}
            return metrics_service_pb2.ExportMetricsServiceResponse()

    def trace_of(self, span: Span) -> list[Span]:
        """All spans of the same trace."""
        return [s for s in self.spans if s.message.trace_id == span.message.trace_id]


def _service_of(resource: Any) -> str:
    attributes = {a.key: str(a.value.string_value) for a in resource.resource.attributes}
    return attributes["service.name"]


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector at `address`, a http:// URL."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.address = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)
