"""Metrics as text, in Prometheus' exposition format 0.0.4.

The format: https://prometheus.io/docs/instrumenting/exposition_formats. Names come from the
catalogue; what is not in it, such as what the SDK measures of itself, is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

from headwater.telemetry.catalogue import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from opentelemetry.sdk.metrics.export import Metric as Exported
    from opentelemetry.sdk.metrics.export import MetricsData

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BY_INSTRUMENT = {metric.instrument_name: metric for metric in METRICS.values()}


def render(data: MetricsData | None) -> str:
    """The text of one scrape; cumulative values."""
    lines = [line for exported in _exported(data) for line in _family(exported)]
    return "\n".join(lines) + "\n" if lines else ""


def _exported(data: MetricsData | None) -> Iterator[Exported]:
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            yield from (metric for metric in scope.metrics if metric.name in _BY_INSTRUMENT)


def _family(exported: Exported) -> Iterator[str]:
    metric = _BY_INSTRUMENT[exported.name]
    name = metric.prometheus_name
    yield f"# HELP {name} {_escaped(metric.help)}"
    yield f"# TYPE {name} {metric.kind}"
    for point in exported.data.data_points:
        if isinstance(point, HistogramDataPoint):
            yield from _histogram(name, point)
        elif isinstance(point, NumberDataPoint):
            yield f"{name}{_labels(point.attributes)} {_number(point.value)}"


def _histogram(name: str, point: HistogramDataPoint) -> Iterator[str]:
    count = 0
    bounds = (*map(_number, point.explicit_bounds), "+Inf")
    for bound, in_bucket in zip(bounds, point.bucket_counts, strict=True):
        count += in_bucket
        yield f"{name}_bucket{_labels(point.attributes, [('le', bound)])} {count}"
    yield f"{name}_sum{_labels(point.attributes)} {_number(point.sum)}"
    yield f"{name}_count{_labels(point.attributes)} {point.count}"


def _labels(attributes: Mapping[str, object] | None, more: Iterable[tuple[str, str]] = ()) -> str:
    pairs = [(key.replace(".", "_"), str(value)) for key, value in (attributes or {}).items()]
    text = ",".join(f'{key}="{_escaped(value, quote=True)}"' for key, value in (*pairs, *more))
    return f"{{{text}}}" if text else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
