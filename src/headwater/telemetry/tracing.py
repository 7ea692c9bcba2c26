"""Spans across processes: W3C trace context travels in gRPC metadata.

Without a configured endpoint the OpenTelemetry API hands out no-op spans. No span says what a
caller sent or what an error's message quotes of it: errors appear as their class and status.
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

# What a user asks for. Other calls (status, heartbeats, watches) belong to a trace only when their
# caller has one.
_ROOT_METHOD = "Generate"


@contextmanager
def server_span(method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[Span]:
    """A span for a call that came in, as a child of the caller's span if it sent one."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    service, _, name = method.lstrip("/").partition("/")
    context = propagate.extract(carrier)
    has_caller = trace.get_current_span(context).get_span_context().is_valid
    if not has_caller and name != _ROOT_METHOD:
        yield trace.INVALID_SPAN
        return
    with _tracer.start_as_current_span(
        f"{service}/{name}",
        context=context,
        kind=trace.SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        yield span


@contextmanager
def span(name: str, attributes: Mapping[str, AttributeValue] | None = None) -> Iterator[Span]:
    """A span for a piece of work inside this process."""
    with _tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        yield current


def failed(span: Span, failure: BaseException, grpc_status: int) -> None:
    """Notes that a call ended with `failure`, and the status code that the caller sees."""
    if span.is_recording():
        span.set_attribute("error.type", type(failure).__name__)
        span.set_attribute("rpc.grpc.status_code", grpc_status)
        span.set_status(trace.StatusCode.ERROR)


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that carries the current span to the callee; empty when there is none."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
