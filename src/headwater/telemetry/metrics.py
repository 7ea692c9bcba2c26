"""The metrics of all three services; no-ops until headwater.telemetry.setup installs a provider.

Names follow the gen_ai.* semantic conventions where one fits, and start with headwater. otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.metrics import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions

    from headwater.generation import Timings, Usage

_meter = metrics.get_meter("headwater")
_time_to_first_token = _meter.create_histogram(
    "gen_ai.server.time_to_first_token", unit="s", description="From arrival to the first token"
)
_time_per_output_token = _meter.create_histogram(
    "gen_ai.server.time_per_output_token", unit="s", description="Between tokens after the first"
)
_request_duration = _meter.create_histogram(
    "gen_ai.server.request.duration", unit="s", description="From arrival to the end"
)
_prompt_tokens = _meter.create_counter(
    "headwater.prompt_tokens", unit="{token}", description="Prompt tokens of finished requests"
)
_generated_tokens = _meter.create_counter(
    "headwater.generation_tokens", unit="{token}", description="Tokens of finished requests"
)

_slo_finished = _meter.create_counter(
    "headwater.slo.finished", unit="{request}", description="Requests that ended well"
)
_slo_attained = _meter.create_counter(
    "headwater.slo.attained", unit="{request}", description="... and met both objectives"
)
_slo_missed_ttft = _meter.create_counter(
    "headwater.slo.missed_ttft", unit="{request}", description="... but had their first token late"
)
_slo_missed_tpot = _meter.create_counter(
    "headwater.slo.missed_tpot", unit="{request}", description="... but had slow tokens"
)
_slo_shed = _meter.create_counter(
    "headwater.slo.shed", unit="{request}", description="Requests refused for lack of time or room"
)


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


def record_request(model_name: str, usage: Usage, timings: Timings) -> None:
    """Counts a request that ended well."""
    attributes = {"gen_ai.request.model": model_name, "gen_ai.operation.name": "generate"}
    _time_to_first_token.record(timings.time_to_first_token_seconds, attributes)
    _request_duration.record(timings.total_seconds, attributes)
    if usage.completion_tokens > 1:
        per_token = timings.decode_seconds / (usage.completion_tokens - 1)
        _time_per_output_token.record(per_token, attributes)
    _prompt_tokens.add(usage.prompt_tokens, attributes)
    _generated_tokens.add(usage.completion_tokens, attributes)


def observe(read: Callable[[], Mapping[str, float]]) -> None:
    """Exports gauges; `read` gives name -> value and is called at each export.

    It is called from the exporter's thread.
    """
    for name in read():

        def callback(_: CallbackOptions, name: str = name) -> Iterable[Observation]:
            return [Observation(read()[name])]

        _meter.create_observable_gauge(name, callbacks=[callback])
