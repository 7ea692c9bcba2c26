"""Every metric that Headwater exports: name, kind, unit, meaning, and who exports it.

Instruments are made from this list and from nothing else (headwater.telemetry.metrics);
docs/observability.md and the dashboards are checked against it.

Names with `vllm:` mean what vLLM's metrics of that name mean, so that its dashboards work. gen_ai.*
follows the OpenTelemetry semantic conventions for generative AI. What only we have starts with
`headwater.`. `process_*` are what Prometheus' own clients call the same things.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["router", "prefill", "decode", "supervisor", "client"]

SERVICES: tuple[Process, ...] = ("router", "prefill", "decode", "supervisor")

# Seconds. TTFT is promised in tens of seconds, time per token in tens of milliseconds.
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 600.0)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
# Tokens: powers of four.
_TOKENS = tuple(float(4**i) for i in range(11))

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


def _vllm(
    name: str,
    kind: Kind,
    unit: str,
    help_text: str,
    process: Process = "router",
    *,
    attributes: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:
    labels = ("model_name", *attributes)
    return Metric(f"vllm:{name}", kind, unit, help_text, (process,), labels, buckets)


_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_CLASS = ("headwater.objective_class",)
_NODE = ("node",)

_REQUESTS = (
    _vllm("num_requests_running", "gauge", "{request}", "Requests in work"),
    _vllm("num_requests_waiting", "gauge", "{request}", "Requests waiting in the router's line"),
    _vllm(
        "time_to_first_token_seconds",
        "histogram",
        "s",
        "From arrival to the first token",
        buckets=_LATENCY,
    ),
    _vllm(
        "inter_token_latency_seconds",
        "histogram",
        "s",
        "Between two tokens of an answer",
        buckets=_PER_TOKEN,
    ),
    _vllm(
        "request_time_per_output_token_seconds",
        "histogram",
        "s",
        "Mean time per token after the first, one value per answer",
        buckets=_PER_TOKEN,
    ),
    _vllm(
        "e2e_request_latency_seconds",
        "histogram",
        "s",
        "From arrival to the end of the answer",
        buckets=_LATENCY,
    ),
    _vllm(
        "request_queue_time_seconds",
        "histogram",
        "s",
        "From arrival to a place and KV blocks",
        buckets=_LATENCY,
    ),
    _vllm(
        "request_prefill_time_seconds",
        "histogram",
        "s",
        "From the place to the computed prompt",
        buckets=_LATENCY,
    ),
    _vllm(
        "request_decode_time_seconds",
        "histogram",
        "s",
        "From the first token to the last",
        buckets=_LATENCY,
    ),
    _vllm(
        "request_prompt_tokens",
        "histogram",
        "{token}",
        "Prompt tokens, one value per answer",
        buckets=_TOKENS,
    ),
    _vllm(
        "request_generation_tokens",
        "histogram",
        "{token}",
        "Tokens, one value per answer",
        buckets=_TOKENS,
    ),
    _vllm(
        "request_success",
        "counter",
        "{request}",
        "Answers that ended well, by reason",
        attributes=("finished_reason",),
    ),
    _vllm("prompt_tokens", "counter", "{token}", "Prompt tokens of answers that ended well"),
    _vllm("generation_tokens", "counter", "{token}", "Tokens sent to callers"),
    Metric(
        "gen_ai.server.time_to_first_token",
        "histogram",
        "s",
        "From arrival to the first token",
        ("router",),
        _GEN_AI,
        _LATENCY,
    ),
    Metric(
        "gen_ai.server.time_per_output_token",
        "histogram",
        "s",
        "Mean time per token after the first, one value per answer",
        ("router",),
        _GEN_AI,
        _PER_TOKEN,
    ),
    Metric(
        "gen_ai.server.request.duration",
        "histogram",
        "s",
        "From arrival to the end, well or not",
        ("router",),
        (*_GEN_AI, "error.type"),
        _LATENCY,
    ),
    Metric(
        "gen_ai.client.operation.duration",
        "histogram",
        "s",
        "A call of headwater.client as the caller sees it",
        ("client",),
        (*_GEN_AI, "error.type"),
        _LATENCY,
    ),
    Metric(
        "gen_ai.client.token.usage",
        "histogram",
        "{token}",
        "Tokens of a call of headwater.client, by type: input, output",
        ("client",),
        (*_GEN_AI, "gen_ai.token.type"),
        _TOKENS,
    ),
    Metric(
        "headwater.requests.failed",
        "counter",
        "{request}",
        "Requests that ended with an error, by the error's class",
        ("router",),
        ("error.type",),
    ),
    Metric(
        "headwater.handover.duration",
        "histogram",
        "s",
        "From the computed prompt to the first token",
        ("router",),
        (),
        _PER_TOKEN,
    ),
    Metric(
        "headwater.router.prompts",
        "counter",
        "{prompt}",
        "Prompts by who computed them: prefill, or decode (extend)",
        ("router",),
        ("path",),
    ),
    Metric(
        "headwater.router.recoveries",
        "counter",
        "{recovery}",
        "How often a request lost an engine and waited for it",
        ("router",),
    ),
    Metric(
        "headwater.router.engine_up",
        "gauge",
        "{engine}",
        "1 when the engine's last health check said SERVING, else 0",
        ("router",),
        ("engine",),
    ),
)

_OBJECTIVES = (
    Metric(
        "headwater.slo.finished",
        "counter",
        "{request}",
        "Answers that ended well, by class of objectives",
        ("router",),
        _CLASS,
    ),
    Metric(
        "headwater.slo.attained",
        "counter",
        "{request}",
        "Those of them that met both objectives",
        ("router",),
        _CLASS,
    ),
    Metric(
        "headwater.slo.missed_ttft",
        "counter",
        "{request}",
        "Those of them that had their first token late",
        ("router",),
        _CLASS,
    ),
    Metric(
        "headwater.slo.missed_tpot",
        "counter",
        "{request}",
        "Those of them whose tokens were slow",
        ("router",),
        _CLASS,
    ),
    Metric(
        "headwater.slo.shed",
        "counter",
        "{request}",
        "Requests refused for lack of time or room",
        ("router",),
        _CLASS,
    ),
)

_PREFILL = (
    Metric(
        "headwater.prefill.running_requests",
        "gauge",
        "{request}",
        "Prompts begun and not done",
        ("prefill",),
    ),
    Metric(
        "headwater.prefill.waiting_requests",
        "gauge",
        "{request}",
        "Prompts not begun",
        ("prefill",),
    ),
    Metric(
        "headwater.prefill.pending_tokens",
        "gauge",
        "{token}",
        "Prompt tokens not computed yet",
        ("prefill",),
    ),
    Metric(
        "headwater.prefill.computed_tokens",
        "counter",
        "{token}",
        "Prompt tokens computed",
        ("prefill",),
    ),
    Metric(
        "headwater.prefill.passes",
        "counter",
        "{pass}",
        "Passes over the weights",
        ("prefill",),
    ),
    Metric(
        "headwater.prefill.busy_time",
        "counter",
        "s",
        "Time spent in passes",
        ("prefill",),
    ),
    Metric(
        "headwater.h2d.copied",
        "counter",
        "By",
        "Weights copied from host memory to the GPU; stays 0 on a CPU",
        ("prefill",),
    ),
    Metric(
        "headwater.h2d.rate",
        "gauge",
        "By/s",
        "The same per second of the passes of the last ten seconds",
        ("prefill",),
    ),
    Metric(
        "headwater.ring.occupancy",
        "gauge",
        "1",
        "Share of the GPU ring's slots with experts that are still to be used",
        ("prefill",),
    ),
)

_DECODE = (
    _vllm(
        "kv_cache_usage_perc",
        "gauge",
        "",
        "Share of the KV pool's blocks that requests hold, 0 to 1",
        "decode",
    ),
    _vllm("prefix_cache_queries", "counter", "{token}", "Prompt tokens of all leases", "decode"),
    _vllm(
        "prefix_cache_hits",
        "counter",
        "{token}",
        "Those of them that were found in the KV pool",
        "decode",
    ),
    _vllm(
        "num_preemptions",
        "counter",
        "{preemption}",
        "How often a request gave its KV blocks back, to compute them again",
        "decode",
    ),
    Metric(
        "headwater.decode.running_requests",
        "gauge",
        "{request}",
        "Requests in the batch",
        ("decode",),
    ),
    Metric(
        "headwater.decode.waiting_requests",
        "gauge",
        "{request}",
        "Requests waiting for a place in the batch, or for blocks",
        ("decode",),
    ),
    Metric(
        "headwater.decode.batch_limit",
        "gauge",
        "{request}",
        "Requests that may run at once, as speed and objectives allow",
        ("decode",),
    ),
    Metric(
        "headwater.decode.pending_tokens",
        "gauge",
        "{token}",
        "Prompt tokens that decode has still to compute",
        ("decode",),
    ),
    Metric(
        "headwater.decode.step_time",
        "gauge",
        "s",
        "Time that a step takes now, with the requests that run; 0: not known yet",
        ("decode",),
    ),
    Metric("headwater.decode.steps", "counter", "{step}", "Steps of the batch", ("decode",)),
    Metric(
        "headwater.decode.busy_time",
        "counter",
        "s",
        "Time spent in steps, without what is computed of prompts",
        ("decode",),
    ),
    Metric(
        "headwater.decode.generated_tokens",
        "counter",
        "{token}",
        "Tokens sampled",
        ("decode",),
    ),
    Metric(
        "headwater.hybrid.steps",
        "counter",
        "{step}",
        "Steps that a GPU computed a part of; stays 0 on a CPU",
        ("decode",),
    ),
    Metric(
        "headwater.hybrid.dual_steps",
        "counter",
        "{step}",
        "Those of them that ran as two micro-batches",
        ("decode",),
    ),
    Metric(
        "headwater.hybrid.dual_gain",
        "gauge",
        "1",
        "Time of one batch over time of two micro-batches, where that is greatest; 0: not known",
        ("decode",),
    ),
    Metric(
        "headwater.hybrid.pulled",
        "counter",
        "By",
        "Keys and values copied from the KV pool to the GPU",
        ("decode",),
    ),
    Metric(
        "headwater.dram.read",
        "counter",
        "By",
        "Weights and KV that steps read, by NUMA node; computed from what a step must read",
        ("decode",),
        _NODE,
    ),
    Metric(
        "headwater.dram.rate",
        "gauge",
        "By/s",
        "The same per second of the steps of the last ten seconds",
        ("decode",),
        _NODE,
    ),
    Metric(
        "headwater.dram.limit",
        "gauge",
        "By/s",
        "Plain reading of the weights by all threads, all nodes, measured at the start; 0: not yet",
        ("decode",),
    ),
    Metric(
        "headwater.dram.roofline",
        "gauge",
        "1",
        "headwater.dram.rate over all nodes, as a share of headwater.dram.limit",
        ("decode",),
    ),
    Metric("headwater.kv.total_blocks", "gauge", "{block}", "Blocks of the KV pool", ("decode",)),
    Metric(
        "headwater.kv.free_blocks",
        "gauge",
        "{block}",
        "Blocks that a lease could get, cached ones among them",
        ("decode",),
    ),
    Metric(
        "headwater.kv.cached_blocks",
        "gauge",
        "{block}",
        "Free blocks whose content may be used again",
        ("decode",),
    ),
    Metric(
        "headwater.kv.quarantined_blocks",
        "gauge",
        "{block}",
        "Blocks of ended leases that a writer may still hold",
        ("decode",),
    ),
    Metric("headwater.kv.leases", "gauge", "{lease}", "Leases alive", ("decode",)),
)

_EVERYWHERE = (
    Metric(
        "headwater.supervisor.restarts",
        "counter",
        "{restart}",
        "How often `headwater up`'s supervisor started a process again",
        ("supervisor",),
        ("process",),
    ),
    Metric(
        "headwater.supervisor.process_up",
        "gauge",
        "{process}",
        "1 when the process runs, else 0",
        ("supervisor",),
        ("process",),
    ),
    Metric("process_cpu_seconds", "counter", "s", "User and system time", SERVICES, ("service",)),
    Metric(
        "process_resident_memory_bytes",
        "gauge",
        "By",
        "Resident memory, shared memory included",
        SERVICES,
        ("service",),
    ),
    Metric(
        "process_private_memory_bytes",
        "gauge",
        "By",
        "Resident memory that is nobody else's: without weights and KV in shared memory",
        SERVICES,
        ("service",),
    ),
    Metric("process_open_fds", "gauge", "{file}", "Open file descriptors", SERVICES, ("service",)),
    Metric(
        "process_start_time_seconds",
        "gauge",
        "s",
        "Start of the process, in Unix time: its changes are restarts",
        SERVICES,
        ("service",),
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*_REQUESTS, *_OBJECTIVES, *_PREFILL, *_DECODE, *_EVERYWHERE)
}
