"""Every metric that Headwater exports: name, kind, unit, meaning, and who exports it.

Instruments are made from this list and from nothing else (headwater.telemetry.metrics);
docs/observability.md and the dashboards are checked against it.

Names with `vllm:` mean what vLLM's metrics of that name mean, so that its dashboards work. gen_ai.*
follows the OpenTelemetry semantic conventions for generative AI. What only we have starts with
`headwater.`. `process_*` are what Prometheus' own clients call the same things.
"""

from __future__ import annotations

from headwater.telemetry.engine_catalogue import DECODE, PREFILL
from headwater.telemetry.metric import (
    LATENCY,
    PER_TOKEN,
    SERVICES,
    TOKENS,
    Metric,
    counter,
    gauge,
    histogram,
)

__all__ = ["METRICS", "SERVICES"]

_MODEL = ("model_name",)
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_CLASS = ("headwater.objective_class",)
_SERVICE = ("service",)


def _vllm_time(name: str, buckets: tuple[float, ...], help_text: str) -> Metric:
    return histogram(f"vllm:{name}_seconds", buckets, "router", help_text, _MODEL)


_REQUESTS = (
    gauge("vllm:num_requests_running", "{request}", "router", "Requests in work", _MODEL),
    gauge(
        "vllm:num_requests_waiting",
        "{request}",
        "router",
        "Requests waiting in the router's line",
        _MODEL,
    ),
    _vllm_time("time_to_first_token", LATENCY, "From arrival to the first token"),
    _vllm_time("inter_token_latency", PER_TOKEN, "Between two tokens of an answer"),
    _vllm_time(
        "request_time_per_output_token",
        PER_TOKEN,
        "Mean time per token after the first, one value per answer",
    ),
    _vllm_time("e2e_request_latency", LATENCY, "From arrival to the end of the answer"),
    _vllm_time("request_queue_time", LATENCY, "From arrival to a place and KV blocks"),
    _vllm_time("request_prefill_time", LATENCY, "From the place to the computed prompt"),
    _vllm_time("request_decode_time", LATENCY, "From the first token to the last"),
    histogram(
        "vllm:request_prompt_tokens",
        TOKENS,
        "router",
        "Prompt tokens, one value per answer",
        _MODEL,
    ),
    histogram(
        "vllm:request_generation_tokens", TOKENS, "router", "Tokens, one value per answer", _MODEL
    ),
    counter(
        "vllm:request_success",
        "{request}",
        "router",
        "Answers that ended well, by reason",
        ("model_name", "finished_reason"),
    ),
    counter(
        "vllm:prompt_tokens",
        "{token}",
        "router",
        "Prompt tokens of answers that ended well",
        _MODEL,
    ),
    counter("vllm:generation_tokens", "{token}", "router", "Tokens sent to callers", _MODEL),
    histogram(
        "gen_ai.server.time_to_first_token",
        LATENCY,
        "router",
        "From arrival to the first token",
        _GEN_AI,
    ),
    histogram(
        "gen_ai.server.time_per_output_token",
        PER_TOKEN,
        "router",
        "Mean time per token after the first, one value per answer",
        _GEN_AI,
    ),
    histogram(
        "gen_ai.server.request.duration",
        LATENCY,
        "router",
        "From arrival to the end, well or not",
        (*_GEN_AI, "error.type"),
    ),
    histogram(
        "gen_ai.client.operation.duration",
        LATENCY,
        "client",
        "A call of headwater.client as the caller sees it",
        (*_GEN_AI, "error.type"),
    ),
    histogram(
        "gen_ai.client.token.usage",
        TOKENS,
        "client",
        "Tokens of a call of headwater.client, by type: input, output",
        (*_GEN_AI, "gen_ai.token.type"),
    ),
    counter(
        "headwater.requests.failed",
        "{request}",
        "router",
        "Requests that ended with an error, by the error's class",
        ("error.type",),
    ),
    histogram(
        "headwater.handover.duration",
        PER_TOKEN,
        "router",
        "From the computed prompt to the first token",
    ),
    counter(
        "headwater.router.prompts",
        "{prompt}",
        "router",
        "Prompts by who computed them: prefill, or decode (extend)",
        ("path",),
    ),
    counter(
        "headwater.router.recoveries",
        "{recovery}",
        "router",
        "How often a request lost an engine and waited for it",
    ),
    gauge(
        "headwater.router.engine_up",
        "{engine}",
        "router",
        "1 when the engine's last health check said SERVING, else 0",
        ("engine",),
    ),
)

_OBJECTIVES = (
    counter(
        "headwater.slo.finished",
        "{request}",
        "router",
        "Answers that ended well, by class of objectives",
        _CLASS,
    ),
    counter(
        "headwater.slo.attained",
        "{request}",
        "router",
        "Those of them that met both objectives",
        _CLASS,
    ),
    counter(
        "headwater.slo.missed_ttft",
        "{request}",
        "router",
        "Those of them that had their first token late",
        _CLASS,
    ),
    counter(
        "headwater.slo.missed_tpot",
        "{request}",
        "router",
        "Those of them whose tokens were slow",
        _CLASS,
    ),
    counter(
        "headwater.slo.shed",
        "{request}",
        "router",
        "Requests refused for lack of time or room",
        _CLASS,
    ),
)

_EVERYWHERE = (
    counter(
        "headwater.supervisor.restarts",
        "{restart}",
        "supervisor",
        "How often `headwater up`'s supervisor started a process again",
        ("process",),
    ),
    gauge(
        "headwater.supervisor.process_up",
        "{process}",
        "supervisor",
        "1 when the process runs, else 0",
        ("process",),
    ),
    Metric("process_cpu_seconds", "counter", "s", "User and system time", SERVICES, _SERVICE),
    Metric(
        "process_resident_memory_bytes",
        "gauge",
        "By",
        "Resident memory, shared memory included",
        SERVICES,
        _SERVICE,
    ),
    Metric(
        "process_private_memory_bytes",
        "gauge",
        "By",
        "Resident memory that is nobody else's: without weights and KV in shared memory",
        SERVICES,
        _SERVICE,
    ),
    Metric("process_open_fds", "gauge", "{file}", "Open file descriptors", SERVICES, _SERVICE),
    Metric(
        "process_start_time_seconds",
        "gauge",
        "s",
        "Start of the process, in Unix time: its changes are restarts",
        SERVICES,
        _SERVICE,
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*_REQUESTS, *_OBJECTIVES, *PREFILL, *DECODE, *_EVERYWHERE)
}
