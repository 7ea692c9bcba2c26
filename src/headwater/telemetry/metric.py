"""What a metric of the catalogue is: its name for each reader, its unit, its buckets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["router", "prefill", "decode", "supervisor", "client"]

SERVICES: tuple[Process, ...] = ("router", "prefill", "decode", "supervisor")

# Seconds. TTFT is promised in tens of seconds, time per token in tens of milliseconds.
LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 600.0)
PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
# Tokens: powers of four.
TOKENS = tuple(float(4**i) for i in range(11))

# How Prometheus spells units; those in braces are left out.
_UNIT_SUFFIXES = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second", "1": "ratio"}
# Names that are fixed elsewhere get no suffix for their unit.
_FIXED = ("vllm:", "process_")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `attributes` are the keys its values may carry, `buckets` upper bounds."""

    name: str
    kind: Kind
    unit: str
    help: str
    processes: tuple[Process, ...]
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def instrument_name(self) -> str:
        """What OpenTelemetry calls it inside a process: it allows no colon in a name."""
        return self.name.replace(":", ".")

    @property
    def prometheus_name(self) -> str:
        """The family as Prometheus shows it; a histogram's series add _bucket, _sum, _count."""
        name = re.sub(r"[^a-zA-Z0-9_:]", "_", self.name)
        suffix = _UNIT_SUFFIXES.get(self.unit, "")
        if suffix and not name.startswith(_FIXED):
            name += f"_{suffix}"
        return f"{name}_total" if self.kind == "counter" else name

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names that a query may use."""
        name = self.prometheus_name
        if self.kind == "histogram":
            return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
        return (name,)


def counter(
    name: str, unit: str, process: Process, help_text: str, attributes: tuple[str, ...] = ()
) -> Metric:
    """A counter that one kind of process exports."""
    return Metric(name, "counter", unit, help_text, (process,), attributes)


def gauge(
    name: str, unit: str, process: Process, help_text: str, attributes: tuple[str, ...] = ()
) -> Metric:
    """A gauge that one kind of process exports."""
    return Metric(name, "gauge", unit, help_text, (process,), attributes)


def histogram(
    name: str,
    buckets: tuple[float, ...],
    process: Process,
    help_text: str,
    attributes: tuple[str, ...] = (),
) -> Metric:
    """A histogram of seconds, or with the buckets TOKENS of tokens."""
    unit = "{token}" if buckets is TOKENS else "s"
    return Metric(name, "histogram", unit, help_text, (process,), attributes, buckets)
