"""What goes to a collector: exporters of the OpenTelemetry SDK, set up for a serving process.

Imported only where an endpoint is configured.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from headwater.telemetry.catalogue import METRICS

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
    from opentelemetry.sdk.resources import Resource

METRICS_INTERVAL_MILLIS = 10_000
# Each sending costs a millisecond or two, however few the spans.
_SPANS_DELAY_MILLIS = 5_000
# A request makes about ten spans: room for a burst of hundreds of requests.
_MAX_QUEUED_SPANS = 8192
# A prompt of a million tokens in chunks of 2,048 has half as many.
_MAX_EVENTS = 1024

_EXPORTED_NAMES = {metric.instrument_name: metric.name for metric in METRICS.values()}


class NamingMetricExporter(OTLPMetricExporter):
    """Gives metrics the names of the catalogue, which may hold a colon."""

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Sends one collection."""
        return super().export(named(metrics_data), timeout_millis, **kwargs)


def named(data: MetricsData) -> MetricsData:
    """The same metrics under the catalogue's names."""
    return dataclasses.replace(
        data,
        resource_metrics=[
            dataclasses.replace(
                resource,
                scope_metrics=[
                    dataclasses.replace(
                        scope,
                        metrics=[
                            dataclasses.replace(
                                metric, name=_EXPORTED_NAMES.get(metric.name, metric.name)
                            )
                            for metric in scope.metrics
                        ],
                    )
                    for scope in resource.scope_metrics
                ],
            )
            for resource in data.resource_metrics
        ],
    )


def tracer_provider(endpoint: str, trace_ratio: float, resource: Resource) -> TracerProvider:
    """Sends spans from a thread of its own; a parent decides whether a trace is kept, else the
    ratio.
    """
    provider = TracerProvider(
        resource=resource,
        sampler=ParentBased(TraceIdRatioBased(trace_ratio)),
        span_limits=SpanLimits(max_events=_MAX_EVENTS),
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=_is_insecure(endpoint))
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_MAX_QUEUED_SPANS,
            schedule_delay_millis=_SPANS_DELAY_MILLIS,
        )
    )
    return provider


def metric_reader(endpoint: str) -> PeriodicExportingMetricReader:
    """Sends metrics every ten seconds, and at the end."""
    exporter = NamingMetricExporter(endpoint=endpoint, insecure=_is_insecure(endpoint))
    return PeriodicExportingMetricReader(exporter, export_interval_millis=METRICS_INTERVAL_MILLIS)


def _is_insecure(endpoint: str) -> bool:
    return not endpoint.startswith("https://")
