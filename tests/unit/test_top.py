"""What `headwater top` shows of invented states, and that it runs in a terminal."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwater.cli.process_use import ProcessUse, Use
from headwater.cli.top_view import render

_WATCHDOG_SECONDS = 120.0

ROUTER = {
    "health": "SERVING",
    "pid": 11,
    "uptime_seconds": 3725.0,
    "restarts": 2,
    "model_name": "M",
    "running_requests": 3,
    "waiting_requests": 1,
    "finished_requests": "120",
    "tokens_per_second": 41.5,
    "recent": {
        "answers": 9,
        "ttft_p50_seconds": 0.25,
        "ttft_p95_seconds": 1.5,
        "tpot_p50_seconds": 0.021,
        "tpot_p95_seconds": 0.05,
    },
    "objectives": [
        {
            "name": "interactive",
            "ttft_objective_seconds": 30.0,
            "tpot_objective_seconds": 0.05,
            "finished_requests": "8",
            "attained_requests": "6",
            "shed_requests": "4",
        }
    ],
}
PREFILL = {
    "health": "SERVING",
    "passes": "5",
    "tokens_per_second": 900.0,
    "pending_tokens": "2048",
    "running_requests": 2,
    "h2d_bytes": "1000",
    "h2d_bytes_per_second": 55.2e9,
    "ring_occupancy": 0.75,
}
DECODE = {
    "health": "NOT_SERVING",
    "kv_layout": {"num_blocks": 200},
    "kv_free_blocks": 150,
    "kv_cached_blocks": 20,
    "kv_leases": 3,
    "prefix_queried_tokens": "400",
    "prefix_cached_tokens": "100",
    "preemptions": "1",
    "dram_bytes_per_second": 18.0e9,
    "dram_limit_bytes_per_second": 24.0e9,
    "running_requests": 3,
    "batch_limit": 16,
    "tokens_per_second": 40.0,
    "step_seconds": 0.02,
}


def shown(states: dict[str, dict[str, Any]], uses: dict[str, Use | None] | None = None) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(states, uses or {}))
    return "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())


def test_a_stack_at_work() -> None:
    text = shown(
        {"router": ROUTER, "prefill": PREFILL, "decode": DECODE},
        {"router": Use(0.5, 60 << 20), "decode": None},
    )
    for line in (
        "router SERVING 11 1:02:05 0.50 60 MiB 2 M",
        "decode NOT_SERVING 0",
        "running 3 answers: 9",
        "waiting 1 TTFT 250.0 ms 1.50 s",
        "finished 120 TPOT 21.0 ms 50.0 ms",
        "tokens/s 41.5 queue",
        "interactive 30.00 s 50.0 ms 8 75.0% 4",
        "decode 40.0 tokens/s batch 3 of 16 step 20.0 ms",
        "prefill 900.0 tokens/s 2048 tokens to compute 2 prompts",
        "20 blocks cached prefixes: 100 of 400 tokens found 25%",
        "3 leases 1 preemptions",
    ):
        assert line in text.splitlines(), text
    assert "DRAM, steps 18.0 GB/s" in text
    assert "75% of 24.0" in text
    assert "H2D, passes 55.2 GB/s" in text
    assert "ring 75%" in text
    assert "50 of 200 blocks held" in text


def test_a_stack_that_is_down_or_idle() -> None:
    down = {name: {"health": "DOWN"} for name in ("router", "prefill", "decode")}
    assert "router DOWN 0" in shown(down)
    idle = ROUTER | {"recent": {}, "objectives": []}
    quiet = DECODE | {"dram_limit_bytes_per_second": 0.0, "prefix_queried_tokens": "0"}
    cpu_only = PREFILL | {"h2d_bytes": "0"}
    text = shown({"router": idle, "prefill": cpu_only, "decode": quiet})
    assert "answers: 0" in text
    assert "H2D" not in text


def write_process(proc: Path, pid: int, ticks: int) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    times = f"{ticks} 0"
    (folder / "stat").write_text(f"{pid} (a b) S 1 1 1 0 -1 0 0 0 0 0 {times} 0 0 20 0 1 0 5")
    (folder / "statm").write_text("100 50 20 1 0 1 0")
    (folder / "cmdline").write_bytes(b"python\0-m\0headwater.services.router\0")


def test_use_of_processes(tmp_path: Path) -> None:
    use = ProcessUse(tmp_path)
    assert use.of("router", None) is None
    assert use.of("router", 7) is None
    write_process(tmp_path, 7, 100)
    first = use.of("router", 7)
    assert first == Use(0.0, 30 * os.sysconf("SC_PAGE_SIZE"))
    write_process(tmp_path, 7, 200)
    second = use.of("router", 7)
    assert second is not None
    assert second.cpus > 0.0
    (tmp_path / "7" / "cmdline").write_bytes(b"sshd")
    assert use.of("router", 7) is None
    # Another process under the same name has no past.
    write_process(tmp_path, 8, 900)
    third = use.of("router", 8)
    assert third is not None
    assert third.cpus == 0.0


@pytest.mark.parametrize("arguments", [["--once"], ["--interval", "0.2"]])
def test_it_runs_in_a_terminal(tmp_path: Path, arguments: list[str]) -> None:
    master, slave = pty.openpty()
    nothing = [f"{name}.listen=127.0.0.1:9" for name in ("router", "prefill", "decode")]
    command = [sys.executable, "-m", "headwater.cli.main", "top", *arguments]
    for setting in (*nothing, "gateway.enabled=false", f"state.run_dir={tmp_path}"):
        command += ["--set", setting]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        # Whoever runs the tests in the background of a shell has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    watchdog = threading.Timer(_WATCHDOG_SECONDS, process.kill)
    watchdog.start()
    output = b""
    try:
        # Each process is a row once a look is over.
        while output.count(b"DOWN") < 3 and (chunk := _read(master)):
            output += chunk
        if "--once" not in arguments:
            process.send_signal(signal.SIGINT)
        # What is left must be read, or the process would wait for somebody to do it.
        while chunk := _read(master):
            output += chunk
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        os.close(master)
    assert b"Traceback" not in output
    assert b"PROCESS" in output


def _read(master: int) -> bytes:
    """The next output; empty when the other end is closed, which Linux tells by an error."""
    try:
        return os.read(master, 4096)
    except OSError:
        return b""
