"""The Grafana dashboard as code: writes grafana/dashboards/headwater.json.

    python docker/observability/dashboard.py

Panels stand below in the order of the page, two a row; tests/unit/test_observability_config.py
checks their queries against the exported metrics, and that the file is what this writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "grafana" / "dashboards" / "headwater.json"
QUANTILES = ("0.5", "0.95", "0.99")
_MODEL = 'model_name=~"$model"'
_CLASS = "headwater_objective_class"


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series; `queries` are (PromQL, legend), `unit` one of Grafana's names."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate({metric}_bucket{{{_MODEL}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"p{float(q) * 100:g}") for q in QUANTILES)


def _rate(metric: str, labels: str = "") -> str:
    return (
        f"rate({metric}{{{labels}}}[$__rate_interval])"
        if labels
        else f"rate({metric}[$__rate_interval])"
    )


PANELS = (
    Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
    Panel(
        "Time per output token",
        "s",
        _quantiles("vllm:request_time_per_output_token_seconds"),
        "Mean of each answer.",
    ),
    Panel(
        "Queue",
        "short",
        (
            (f"vllm:num_requests_waiting{{{_MODEL}}}", "waiting in the router"),
            (f"vllm:num_requests_running{{{_MODEL}}}", "in work"),
            ("headwater_prefill_waiting_requests", "waiting in prefill"),
            ("headwater_decode_waiting_requests", "waiting in decode"),
        ),
    ),
    Panel("Time in the queue", "s", _quantiles("vllm:request_queue_time_seconds")),
    Panel(
        "Throughput",
        "short",
        (
            (_rate("vllm:generation_tokens_total", _MODEL), "generated tokens/s"),
            (_rate("headwater_prefill_computed_tokens_total"), "computed prompt tokens/s"),
            (_rate("vllm:prompt_tokens_total", _MODEL), "prompt tokens/s, cached ones too"),
        ),
    ),
    Panel(
        "Answers",
        "reqps",
        (
            (
                f"sum by (finished_reason) ({_rate('vllm:request_success_total', _MODEL)})",
                "{{finished_reason}}",
            ),
            (
                f"sum by (error_type) ({_rate('headwater_requests_failed_total')})",
                "failed: {{error_type}}",
            ),
        ),
    ),
    Panel(
        "Objectives attained",
        "percentunit",
        (("1 - headwater:slo_miss:ratio_rate5m", "{{" + _CLASS + "}}"),),
        "Share of answers, refused requests among them, that met both objectives of their class.",
    ),
    Panel(
        "Objectives missed",
        "reqps",
        (
            (
                f"sum by ({_CLASS}) ({_rate('headwater_slo_missed_ttft_total')})",
                "late: {{" + _CLASS + "}}",
            ),
            (
                f"sum by ({_CLASS}) ({_rate('headwater_slo_missed_tpot_total')})",
                "slow: {{" + _CLASS + "}}",
            ),
            (
                f"sum by ({_CLASS}) ({_rate('headwater_slo_shed_total')})",
                "refused: {{" + _CLASS + "}}",
            ),
        ),
    ),
    Panel(
        "KV pool in use",
        "percentunit",
        ((f"vllm:kv_cache_usage_perc{{{_MODEL}}}", "blocks that requests hold"),),
    ),
    Panel(
        "KV blocks",
        "short",
        (
            ("headwater_kv_total_blocks", "all"),
            ("headwater_kv_free_blocks", "free"),
            ("headwater_kv_cached_blocks", "free, with content"),
            ("headwater_kv_quarantined_blocks", "quarantined"),
        ),
    ),
    Panel(
        "Prefix hits",
        "percentunit",
        (
            (
                f"{_rate('vllm:prefix_cache_hits_total', _MODEL)}"
                f" / {_rate('vllm:prefix_cache_queries_total', _MODEL)}",
                "prompt tokens found in the pool",
            ),
        ),
    ),
    Panel(
        "Preempted and recovered",
        "reqps",
        (
            (_rate("vllm:num_preemptions_total", _MODEL), "preempted"),
            (_rate("headwater_router_recoveries_total"), "recovered from the loss of an engine"),
        ),
    ),
    Panel(
        "DRAM read by decode, per NUMA node",
        "Bps",
        (
            ("headwater_dram_rate_bytes_per_second", "node {{node}}"),
            ("headwater_dram_limit_bytes_per_second", "plain reading, all nodes"),
        ),
    ),
    Panel(
        "Share of the DRAM roofline",
        "percentunit",
        (("headwater_dram_roofline_ratio", "decode steps"),),
    ),
    Panel(
        "Host to device",
        "Bps",
        (("headwater_h2d_rate_bytes_per_second", "weights to the GPU"),),
        "Nothing where prompts are computed on the CPU.",
    ),
    Panel(
        "GPU ring",
        "percentunit",
        (("headwater_ring_occupancy_ratio", "slots with experts still to be used"),),
    ),
    Panel(
        "Decode batch",
        "short",
        (
            ("headwater_decode_running_requests", "requests"),
            ("headwater_decode_batch_limit", "limit by speed and objectives"),
        ),
    ),
    Panel("Decode step", "s", (("headwater_decode_step_time_seconds", "time of a step now"),)),
    Panel(
        "Private memory",
        "bytes",
        (("process_private_memory_bytes", "{{service}}"),),
        "Without weights and KV, which are shared.",
    ),
    Panel(
        "Restarts in the last hour",
        "short",
        (("changes(process_start_time_seconds[1h])", "{{service}}"),),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana's JSON model has it."""
    datasource = {"type": "prometheus", "uid": "prometheus"}
    panels = []
    for number, panel in enumerate(PANELS):
        targets = [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ]
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.help,
                "datasource": datasource,
                "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"tooltip": {"mode": "multi"}},
                "targets": targets,
            }
        )
    model = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": datasource,
        "query": "label_values(vllm:num_requests_running, model_name)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "headwater",
        "title": "Headwater",
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [model]},
        "panels": panels,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
