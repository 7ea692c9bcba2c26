"""Turns OpenTelemetry on when an endpoint is configured, and sets up logging.

Without an endpoint nothing of the SDK is imported and every span and metric is a no-op.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.config import TelemetryConfig


def configure_logging(config: TelemetryConfig) -> None:
    """Logs to standard error, a line per record."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )


@contextmanager
def telemetry(service_name: str, config: TelemetryConfig) -> Iterator[None]:
    """Exports traces and metrics over OTLP while the block runs, and flushes them at its end."""
    if not config.otlp_endpoint:
        yield
        return
    from opentelemetry import metrics, trace
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create({"service.name": service_name})
    is_insecure = not config.otlp_endpoint.startswith("https://")
    tracer_provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(config.trace_ratio))
    )
    tracer_provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=is_insecure),
            schedule_delay_millis=1000,
        )
    )
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=config.otlp_endpoint, insecure=is_insecure),
        export_interval_millis=10_000,
    )
    meter_provider = MeterProvider(resource=resource, metric_readers=[reader])
    trace.set_tracer_provider(tracer_provider)
    metrics.set_meter_provider(meter_provider)
    try:
        yield
    finally:
        tracer_provider.shutdown()
        meter_provider.shutdown()
