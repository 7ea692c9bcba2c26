"""Turns telemetry on for a process, as the settings say.

Without an OTLP endpoint and without a Prometheus address nothing of the SDK is imported, and every
span and metric is a no-op.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

    from headwater.config import TelemetryConfig
    from headwater.telemetry.metric import Process


logger = logging.getLogger(__name__)


@contextmanager
def telemetry(service: Process, config: TelemetryConfig) -> Iterator[None]:
    """Exports traces and metrics of `service` while the block runs, and flushes them at its end.

    Raises ConfigError when the Prometheus address cannot be bound.
    """
    if not (config.otlp_endpoint or config.prometheus_listen):
        yield
        return
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create(
        {"service.name": f"headwater-{service}", "service.version": version("headwater")}
    )
    with ExitStack() as stack:
        if config.otlp_endpoint:
            _export_traces(config, resource, stack)
        _export_metrics(service, config, resource, stack)
        yield


def _export_traces(config: TelemetryConfig, resource: Resource, stack: ExitStack) -> None:
    from opentelemetry import trace

    from headwater.telemetry.otlp import tracer_provider

    provider = tracer_provider(config.otlp_endpoint, config.trace_ratio, resource)
    trace.set_tracer_provider(provider)
    stack.callback(provider.shutdown)


def _export_metrics(
    service: Process, config: TelemetryConfig, resource: Resource, stack: ExitStack
) -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from headwater.telemetry.exposition import render
    from headwater.telemetry.process_facts import observe_process
    from headwater.telemetry.scrape import scrape_address, scrape_endpoint

    readers: list[MetricReader] = []
    if config.otlp_endpoint:
        from headwater.telemetry.otlp import metric_reader

        readers.append(metric_reader(config.otlp_endpoint))
    scraped = InMemoryMetricReader()
    if config.prometheus_listen:
        readers.append(scraped)
    # Exemplars would double what a value costs, and there is one per token.
    provider = MeterProvider(
        metric_readers=readers, resource=resource, exemplar_filter=AlwaysOffExemplarFilter()
    )
    metrics.set_meter_provider(provider)
    stack.callback(provider.shutdown)
    observe_process(service)
    if config.prometheus_listen:
        lock = threading.Lock()

        def read() -> str:
            # Two scrapes at once would share one collection between them.
            with lock:
                return render(scraped.get_metrics_data())

        host, port = scrape_address(config.prometheus_listen, service)
        port = stack.enter_context(scrape_endpoint((host, port), read))
        logger.info("metrics at http://%s:%d/metrics", host, port)
