"""The command `headwater` as a user runs it, with the tiny model."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headwater.shm import list_segments
from tests.integration.stack import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADWATER = [sys.executable, "-m", "headwater.cli.main"]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAIT_SECONDS = 120
# The prompt, and what the line editor writes once it waits for a key.
PROMPT = "\x1b[0m>"


@dataclass
class Cli:
    """Runs commands against one stack of its own."""

    environ: dict[str, str]
    shm_prefix: str

    def run(self, *arguments: str, status: int = 0) -> str:
        """Standard output; with another `status` expected, standard error."""
        result = subprocess.run(
            [*HEADWATER, *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert result.returncode == status, f"{result.stdout}\n{result.stderr}"
        return result.stderr if status else result.stdout

    @property
    def run_dir(self) -> Path:
        return Path(self.environ["HEADWATER_STATE_RUN_DIR"]) / self.shm_prefix

    def status(self, status: int | None = 0) -> dict[str, Any]:
        result = subprocess.run(
            [*HEADWATER, "status", "--json"], env=self.environ, capture_output=True, text=True
        )
        assert status is None or result.returncode == status, result.stderr
        parsed: dict[str, Any] = json.loads(result.stdout)
        return parsed

    def segments(self) -> list[str]:
        return [s.name for s in list_segments(f"{self.shm_prefix}.")]


@pytest.fixture
def cli(tiny_model: Path, tmp_path: Path, shm_prefix: str) -> Iterator[Cli]:
    ports = [free_port() for _ in range(5)]
    decode, prefill, router, gateway, metrics = (f"127.0.0.1:{port}" for port in ports)
    settings = {
        "MODEL_PATH": str(tiny_model),
        "MODEL_NAME": "tiny",
        "SHM_PREFIX": shm_prefix,
        "KV_POOL_TOKENS": "4096",
        "DECODE_LISTEN": decode,
        "PREFILL_LISTEN": prefill,
        "PREFILL_DECODE_ADDRESS": decode,
        "ROUTER_LISTEN": router,
        "ROUTER_PREFILL_ADDRESS": prefill,
        # Where decode computes a prompt there is no progress to show.
        "ROUTER_PROMPT_PATH": "prefill",
        "ROUTER_DECODE_ADDRESS": decode,
        "GATEWAY_LISTEN": gateway,
        "GATEWAY_METRICS_LISTEN": metrics,
        "STATE_RUN_DIR": str(tmp_path / "run"),
        "STATE_CACHE_DIR": str(tmp_path / "cache"),
    }
    environ = {name: value for name, value in os.environ.items() if name[:10] != "HEADWATER_"}
    environ |= {f"HEADWATER_{name}": value for name, value in settings.items()}
    cli = Cli(environ, shm_prefix)
    yield cli
    cli.run("down", "--release")
    assert cli.segments() == []


def test_up_use_kill_up_down(cli: Cli) -> None:
    """The life of a stack, the gateway included."""
    printed = cli.run("up")
    for setting in ("ROUTER_LISTEN", "PREFILL_LISTEN", "DECODE_LISTEN", "GATEWAY_LISTEN"):
        assert cli.environ[f"HEADWATER_{setting}"] in printed

    status = cli.status()
    assert set(status["processes"]) == {"router", "prefill", "decode", "gateway"}
    assert {p["health"] for p in status["processes"].values()} == {"SERVING"}
    decode = status["processes"]["decode"]
    assert decode["model_name"] == "tiny"
    assert decode["weights"]["name"].startswith(cli.shm_prefix)
    assert decode["kv_free_blocks"] == decode["kv_layout"]["num_blocks"] == 256
    assert not decode["weights_reattached"]

    url = f"http://{cli.environ['HEADWATER_GATEWAY_LISTEN']}"
    chat = [sys.executable, str(EXAMPLES / "chat_openai.py"), url]
    assert subprocess.run(chat, capture_output=True, check=True, timeout=WAIT_SECONDS).stdout

    answer = json.loads(cli.run("generate", "hello", "--max-tokens", "8", "--json", "--seed", "1"))
    assert answer["usage"]["prompt_tokens"] == 5
    assert 1 <= answer["usage"]["completion_tokens"] <= 8
    assert "tiny" in cli.run("status")

    for victim in ("decode", "prefill", "router", "gateway"):
        os.kill(cli.status()["processes"][victim]["pid"], signal.SIGKILL)
        while cli.status(status=None)["processes"][victim].get("restarts") != 1:
            pass
        cli.run("up")
        cli.run("generate", "hello", "--max-tokens", "8")

    # Without the supervisor `headwater up` brings back what is missing.
    os.kill(int((cli.run_dir / "supervisor.pid").read_text().split()[0]), signal.SIGKILL)
    pids = {name: process["pid"] for name, process in cli.status()["processes"].items()}
    for victim in ("decode", "prefill", "router", "gateway"):
        os.kill(pids[victim], signal.SIGKILL)
        cli.run("up")
        os.kill(int((cli.run_dir / "supervisor.pid").read_text().split()[0]), signal.SIGKILL)
        renewed = {name: p["pid"] for name, p in cli.status()["processes"].items()}
        assert {name for name in pids if renewed[name] != pids[name]} == {victim}
        pids = renewed
        cli.run("generate", "hello", "--max-tokens", "8")
    assert cli.status()["processes"]["decode"]["weights_reattached"]
    kinds = [segment["kind"] for segment in json.loads(cli.run("shm", "ls", "--json"))]
    assert sorted(kinds) == ["kv", "weights"]

    printed = cli.run("down")
    assert all(f"stopped {name}" in printed for name in pids)
    assert len(cli.segments()) == 1, "the weights stay for the next start"
    cli.status(status=1)
    assert "weights" in cli.run("shm", "reap", "--release")
    assert cli.segments() == []


def test_other_settings_need_down_first(cli: Cli) -> None:
    cli.run("up", "--no-gateway")
    message = cli.run("up", "--no-gateway", "--set", "kv.slots=8", status=1)
    assert "run already, with other settings" in message
    assert "headwater down" in message


def test_port_in_use(cli: Cli) -> None:
    with socket.socket() as listener:
        host, _, port = cli.environ["HEADWATER_DECODE_LISTEN"].partition(":")
        listener.bind((host, int(port)))
        listener.listen()
        message = cli.run("up", "--no-gateway", status=1)
    assert f"cannot listen on {host}:{port}: the port is in use" in message
    health = {p["health"] for p in cli.status(status=1)["processes"].values()}
    assert health == {"DOWN"}, "what was started is stopped again"
    cli.run("up", "--no-gateway")


def test_commands_without_a_stack_say_so(cli: Cli) -> None:
    message = cli.run("generate", "hello", status=1)
    assert message.count("\n") == 1
    assert "headwater generate: " in message
    assert cli.environ["HEADWATER_ROUTER_LISTEN"] in message
    assert cli.run("shm", "reap") == "nothing to remove\n"


def test_a_missing_model_is_named(cli: Cli, tmp_path: Path) -> None:
    message = cli.run("up", "--model", str(tmp_path / "nowhere"), status=1)
    assert str(tmp_path / "nowhere") in message
    assert "config.json" in message


class Terminal:
    """`headwater chat` on a pseudo-terminal."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable,
                [*HEADWATER, "chat", *arguments],
                {**cli.environ, "TERM": "vt100", "PROMPT_TOOLKIT_NO_CPR": "1"},
            )
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str, after: int = 0) -> int:
        """Reads until `text` has come; returns the position behind it."""
        while text not in self.seen[after:]:
            ready, _, _ = select.select([self._file], [], [], WAIT_SECONDS)
            assert ready, f"nothing more after {self.seen!r}"
            self.seen += os.read(self._file, 4096).decode(errors="replace")
        return self.seen.index(text, after) + len(text)

    def wait(self) -> int:
        """The exit status."""
        while True:
            try:
                if not os.read(self._file, 4096):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.pid, 0)
        os.close(self._file)
        return os.waitstatus_to_exitcode(status)


def test_chat_in_a_terminal(cli: Cli) -> None:
    """Streams; Ctrl-C ends the answer and not the program; Ctrl-D ends the program."""
    cli.run("up", "--no-gateway")
    # No end-of-sequence within reach: the answer goes on until it is cancelled.
    chat = Terminal(cli, "--max-tokens", "450", "--temperature", "100", "--seed", "3")
    end = chat.wait_for(PROMPT)
    chat.send("hello\r")
    end = chat.wait_for("reading the prompt", end)
    chat.send("\x03")
    end = chat.wait_for("[cancelled]", end)
    end = chat.wait_for(PROMPT, end)
    chat.send("/new\r")
    end = chat.wait_for(PROMPT, end)
    chat.send("\x04")
    assert chat.wait() == 0
    decode = cli.status()["processes"]["decode"]
    assert decode["running_requests"] == 0
