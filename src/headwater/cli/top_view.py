"""What `headwater top` shows, from status replies as JSON has them; pure, so that tests see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headwater.cli.process_use import Use

State: TypeAlias = Mapping[str, Any]

_HEALTH_STYLES = {"SERVING": "green", "NOT_SERVING": "yellow", "DOWN": "bold red"}
_BAR_WIDTH = 30


def render(states: Mapping[str, State], uses: Mapping[str, Use | None]) -> RenderableType:
    """Processes, requests, latencies, bandwidths and KV, from top to bottom."""
    router, decode = states["router"], states["decode"]
    parts: list[RenderableType] = [_processes(states, uses)]
    if router.get("model_name"):
        parts += [Text(), _requests(router), Text(), _objectives(router)]
    if "kv_layout" in decode:
        parts += [Text(), _bandwidths(states["prefill"], decode), Text(), _kv(decode)]
    return Group(*parts)


def _processes(states: Mapping[str, State], uses: Mapping[str, Use | None]) -> Table:
    table = _table("PROCESS", "HEALTH", "PID", "UP", "CPUS", "PRIVATE", "RESTARTS", "MODEL")
    for name, state in states.items():
        use = uses.get(name)
        table.add_row(
            name,
            Text(state["health"], style=_HEALTH_STYLES[state["health"]]),
            str(state.get("pid") or ""),
            _duration(state.get("uptime_seconds")),
            "" if use is None else f"{use.cpus:.2f}",
            "" if use is None else f"{use.private_bytes / 2**20:.0f} MiB",
            str(state.get("restarts", 0)),
            str(state.get("model_name", "")),
        )
    return table


def _requests(router: State) -> Table:
    table = _table("REQUESTS", "", "LAST MINUTE", "P50", "P95")
    recent = router.get("recent", {})
    counts = (
        ("running", str(router["running_requests"])),
        ("waiting", str(router["waiting_requests"])),
        ("finished", str(router["finished_requests"])),
        ("tokens/s", f"{router['tokens_per_second']:.1f}"),
    )
    latencies = (
        (f"answers: {recent.get('answers', 0)}", "", ""),
        *(
            (title, *(_seconds(recent.get(f"{key}_{p}_seconds")) for p in ("p50", "p95")))
            for title, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("queue", "queue"))
        ),
    )
    for count, latency in zip(counts, latencies, strict=True):
        table.add_row(*count, *latency)
    return table


def _objectives(router: State) -> Table:
    table = _table("CLASS", "TTFT", "TPOT", "FINISHED", "ATTAINED", "SHED")
    for found in router.get("objectives", ()):
        finished, attained = int(found["finished_requests"]), int(found["attained_requests"])
        table.add_row(
            found["name"],
            _seconds(found["ttft_objective_seconds"]),
            _seconds(found["tpot_objective_seconds"]),
            str(finished),
            f"{attained / finished:.1%}" if finished else "",
            str(found["shed_requests"]),
        )
    return table


def _bandwidths(prefill: State, decode: State) -> Table:
    table = _table("BANDWIDTH", "", "", "")
    rate, limit = decode["dram_bytes_per_second"], decode["dram_limit_bytes_per_second"]
    share = f"{rate / limit:.0%} of {limit / 1e9:.1f}" if limit else ""
    table.add_row("DRAM, steps", _rate(rate), _bar(rate, limit), share)
    step = f"step {_seconds(decode['step_seconds'])}" if decode["step_seconds"] else ""
    batch = f"batch {decode['running_requests']} of {decode['batch_limit']}"
    table.add_row("decode", f"{decode['tokens_per_second']:.1f} tokens/s", batch, step)
    if "passes" in prefill:
        speed = f"{prefill['tokens_per_second']:.1f} tokens/s"
        pending = f"{prefill['pending_tokens']} tokens to compute"
        table.add_row("prefill", speed, pending, f"{prefill['running_requests']} prompts")
        if int(prefill["h2d_bytes"]):
            ring = prefill["ring_occupancy"]
            speed = _rate(prefill["h2d_bytes_per_second"])
            table.add_row("H2D, passes", speed, _bar(ring, 1.0), f"ring {ring:.0%}")
    return table


def _kv(decode: State) -> Table:
    table = _table("KV POOL", "", "")
    total = int(decode["kv_layout"]["num_blocks"])
    used = total - int(decode["kv_free_blocks"])
    table.add_row(f"{used} of {total} blocks held", _bar(used, total), f"{used / total:.0%}")
    asked, found = int(decode["prefix_queried_tokens"]), int(decode["prefix_cached_tokens"])
    table.add_row(
        f"{decode['kv_cached_blocks']} blocks cached",
        f"prefixes: {found} of {asked} tokens found",
        f"{found / asked:.0%}" if asked else "",
    )
    table.add_row(f"{decode['kv_leases']} leases", f"{decode['preemptions']} preemptions", "")
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _bar(value: float, total: float) -> RenderableType:
    if not total:
        return ""
    return ProgressBar(total=total, completed=min(value, total), width=_BAR_WIDTH)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def _seconds(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
