"""The instruments of all processes, made from the catalogue, and what is recorded on them.

They are no-ops until headwater.telemetry.setup installs a provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry import metrics
from opentelemetry.metrics import Observation

from headwater.telemetry.catalogue import METRICS
from headwater.telemetry.metric import Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, Counter, Histogram

    from headwater.generation import FinishReason, Timings, Usage

# A value, or several with the attributes that tell them apart.
Reading: TypeAlias = float | Sequence[tuple[float, Mapping[str, str]]]

SCOPE = "headwater"
PROVIDER_NAME = "headwater"

_meter = metrics.get_meter(SCOPE)


def _metric(name: str, kind: Kind) -> Metric:
    metric = METRICS[name]
    assert metric.kind == kind, f"{name} is a {metric.kind}"
    return metric


def _counter(name: str) -> Counter:
    metric = _metric(name, "counter")
    return _meter.create_counter(metric.instrument_name, unit=metric.unit, description=metric.help)


def _histogram(name: str) -> Histogram:
    metric = _metric(name, "histogram")
    return _meter.create_histogram(
        metric.instrument_name,
        unit=metric.unit,
        description=metric.help,
        explicit_bucket_boundaries_advisory=metric.buckets,
    )


_ttft = _histogram("vllm:time_to_first_token_seconds")
_token_gap = _histogram("vllm:inter_token_latency_seconds")
_tpot = _histogram("vllm:request_time_per_output_token_seconds")
_latency = _histogram("vllm:e2e_request_latency_seconds")
_queue_time = _histogram("vllm:request_queue_time_seconds")
_prefill_time = _histogram("vllm:request_prefill_time_seconds")
_decode_time = _histogram("vllm:request_decode_time_seconds")
_prompt_tokens = _histogram("vllm:request_prompt_tokens")
_answer_tokens = _histogram("vllm:request_generation_tokens")
_success = _counter("vllm:request_success")
_prompt_tokens_total = _counter("vllm:prompt_tokens")
_server_ttft = _histogram("gen_ai.server.time_to_first_token")
_server_tpot = _histogram("gen_ai.server.time_per_output_token")
_server_duration = _histogram("gen_ai.server.request.duration")
_client_duration = _histogram("gen_ai.client.operation.duration")
_client_tokens = _histogram("gen_ai.client.token.usage")
_handover = _histogram("headwater.handover.duration")
_failed = _counter("headwater.requests.failed")
_recoveries = _counter("headwater.router.recoveries")
_slo_finished = _counter("headwater.slo.finished")
_slo_attained = _counter("headwater.slo.attained")
_slo_missed_ttft = _counter("headwater.slo.missed_ttft")
_slo_missed_tpot = _counter("headwater.slo.missed_tpot")
_slo_shed = _counter("headwater.slo.shed")


class RequestMetrics:
    """What the router counts and times of the requests for one model."""

    def __init__(self, model_name: str) -> None:
        self._model = {"model_name": model_name}
        self._model_name = model_name

    def token_gap(self, seconds: float) -> None:
        """Two tokens of an answer came `seconds` after each other."""
        _token_gap.record(seconds, self._model)

    def answered(
        self, operation: str, reason: FinishReason, usage: Usage, timings: Timings
    ) -> None:
        """An answer ended well."""
        model, gen_ai = self._model, self._gen_ai(operation)
        _success.add(1, {**model, "finished_reason": reason.value})
        _prompt_tokens_total.add(usage.prompt_tokens, model)
        _prompt_tokens.record(usage.prompt_tokens, model)
        _answer_tokens.record(usage.completion_tokens, model)
        _latency.record(timings.total_seconds, model)
        _server_duration.record(timings.total_seconds, gen_ai)
        _queue_time.record(timings.queue_seconds, model)
        _prefill_time.record(timings.prefill_seconds, model)
        _decode_time.record(timings.decode_seconds, model)
        _handover.record(timings.handover_seconds)
        _ttft.record(timings.time_to_first_token_seconds, model)
        _server_ttft.record(timings.time_to_first_token_seconds, gen_ai)
        if (per_token := seconds_per_token(usage, timings)) is not None:
            _tpot.record(per_token, model)
            _server_tpot.record(per_token, gen_ai)

    def failed(self, operation: str, failure: BaseException, seconds: float) -> None:
        """A request ended with an error, or was given up by its caller, after `seconds`."""
        is_given_up = isinstance(failure, asyncio.CancelledError | GeneratorExit)
        error_type = "CancelledError" if is_given_up else type(failure).__name__
        _failed.add(1, {"error.type": error_type})
        _server_duration.record(seconds, {**self._gen_ai(operation), "error.type": error_type})

    def _gen_ai(self, operation: str) -> dict[str, str]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER_NAME,
            "gen_ai.request.model": self._model_name,
        }


def seconds_per_token(usage: Usage, timings: Timings) -> float | None:
    """Mean time per token after the first; None for an answer of a single token."""
    gaps = usage.completion_tokens - 1
    return timings.decode_seconds / gaps if gaps > 0 else None


def start_at_zero(objective_classes: Iterable[str]) -> None:
    """Shows the router's counters before their first event: else it would be in no rate."""
    _recoveries.add(0)
    for name in objective_classes:
        attributes = {"headwater.objective_class": name}
        for counter in (
            _slo_finished,
            _slo_attained,
            _slo_missed_ttft,
            _slo_missed_tpot,
            _slo_shed,
        ):
            counter.add(0, attributes)


def record_recovery() -> None:
    """Counts a request that lost an engine and waits for it."""
    _recoveries.add(1)


def record_outcome(objective_class: str, *, is_early: bool, is_fast: bool) -> None:
    """Counts a request that ended well, against the objectives of its class."""
    attributes = {"headwater.objective_class": objective_class}
    _slo_finished.add(1, attributes)
    _slo_attained.add(int(is_early and is_fast), attributes)
    _slo_missed_ttft.add(int(not is_early), attributes)
    _slo_missed_tpot.add(int(not is_fast), attributes)


def record_shed(objective_class: str) -> None:
    """Counts a request that was refused early."""
    _slo_shed.add(1, {"headwater.objective_class": objective_class})


def record_client_call(
    operation: str, seconds: float, usage: Usage | None, error_type: str | None
) -> None:
    """A call of headwater.client ended, with `usage` or with an error."""
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER_NAME}
    outcome = {**attributes, "error.type": error_type} if error_type else attributes
    _client_duration.record(seconds, outcome)
    if usage is not None:
        for kind, count in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
            _client_tokens.record(count, {**attributes, "gen_ai.token.type": kind})


def observe(
    readers: Mapping[str, Callable[[], Reading]],
    attributes: Mapping[str, str] | None = None,
) -> None:
    """Exports gauges and counters of the catalogue that are read when they are asked for.

    A reader gives a value, or (value, attributes) pairs; `attributes` belong to values without
    their own. Readers are called from the exporter's threads.
    """
    for name, read in readers.items():
        metric = METRICS[name]
        make = {
            "gauge": _meter.create_observable_gauge,
            "counter": _meter.create_observable_counter,
        }[metric.kind]
        make(
            metric.instrument_name,
            callbacks=[_callback(read, dict(attributes or {}))],
            unit=metric.unit,
            description=metric.help,
        )


def _callback(
    read: Callable[[], Reading], attributes: dict[str, str]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def callback(_: CallbackOptions) -> Iterable[Observation]:
        reading = read()
        if isinstance(reading, int | float):
            return [Observation(reading, attributes)]
        return [Observation(value, dict(own)) for value, own in reading]

    return callback
