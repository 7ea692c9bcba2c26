"""Spans across processes: W3C trace context travels in gRPC metadata.

Without a configured endpoint the OpenTelemetry API hands out no-op spans.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import propagate, trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

_tracer = trace.get_tracer("headwater")


@contextmanager
def server_span(method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[Span]:
    """A span for a call that came in, as a child of the caller's span if it sent one."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    service, _, name = method.lstrip("/").partition("/")
    with _tracer.start_as_current_span(
        f"{service}/{name}",
        context=propagate.extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
    ) as span:
        yield span


@contextmanager
def span(name: str, attributes: Mapping[str, AttributeValue] | None = None) -> Iterator[Span]:
    """A span for a piece of work inside this process."""
    with _tracer.start_as_current_span(name, attributes=attributes) as current:
        yield current


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that carries the current span to the callee; empty when there is none."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
