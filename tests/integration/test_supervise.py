"""A process that hangs is found out, ended and started again, and only such a one."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from headwater.cli import stack as cli_stack
from headwater.cli.pulse import Pulse
from headwater.cli.supervise import MAX_UNANSWERED, Supervisor, read_restarts
from headwater.config import load_config
from headwater.rpc.link import Link
from tests.integration.stack import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.integration.stack import Stack

ASK_SECONDS = 0.2


def look_until(pulse: Pulse, is_reached: Callable[[], bool]) -> None:
    """Polls, as the supervisor does."""
    while not is_reached():
        pulse.look()
        time.sleep(0.01)


def test_the_pulse_of_a_process(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack()
    # It answers without decode, too: it lives, although it does not serve.
    stack.spawn("prefill")
    pulse = Pulse(stack.addresses["prefill"], ask_seconds=ASK_SECONDS)
    nobody = Pulse(f"127.0.0.1:{free_port()}", ask_seconds=ASK_SECONDS)
    process = stack.processes["prefill"]
    look_until(pulse, lambda: "listening" in stack.log("prefill"))
    assert pulse.num_unanswered == 0
    process.send_signal(signal.SIGSTOP)
    look_until(pulse, lambda: pulse.num_unanswered >= 2)
    process.send_signal(signal.SIGCONT)
    look_until(pulse, lambda: pulse.num_unanswered == 0)
    for _ in range(50):
        nobody.look()
        time.sleep(0.01)
    assert nobody.num_unanswered == 0, "a refused connection is no silence"
    pulse.close()
    nobody.close()


class FakeProcess:
    """A process as the supervisor handles it."""

    def __init__(self) -> None:
        self.is_alive = True
        self.num_starts = 0
        self.num_kills = 0

    def pid(self) -> int | None:
        return 1 if self.is_alive else None

    def start(self, command: object, environ: object) -> None:
        self.is_alive = True
        self.num_starts += 1

    def kill(self) -> None:
        self.is_alive = False
        self.num_kills += 1


class FakePulse:
    def __init__(self, address: str, link: Link) -> None:
        self.num_unanswered = 0

    def look(self) -> None:
        pass


def test_what_hangs_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {name: FakeProcess() for name in ("decode", "prefill", "router", "gateway")}
    monkeypatch.setattr(cli_stack, "members", lambda config: members)
    monkeypatch.setattr("headwater.cli.supervise.Pulse", FakePulse)
    config = load_config(config_file=None, environ={}, assignments=[f"state.run_dir={tmp_path}"])
    (tmp_path / config.shm.prefix).mkdir()
    supervisor = Supervisor(config, tmp_path / "config.toml")
    pulse = supervisor._pulses["prefill"]
    pulse.num_unanswered = MAX_UNANSWERED - 1
    supervisor.check(0.0)
    assert members["prefill"].num_kills == 0
    pulse.num_unanswered = MAX_UNANSWERED
    supervisor.check(1.0)
    assert members["prefill"].num_kills == 1
    # Found dead, and after the back-off started; the others were left alone.
    supervisor.check(2.0)
    supervisor.check(100.0)
    supervisor.check(101.0)
    assert [each.num_starts for each in members.values()] == [0, 1, 0, 0]
    assert [each.num_kills for each in members.values()] == [0, 1, 0, 0]
    assert read_restarts(config) == {"decode": 0, "prefill": 1, "router": 0, "gateway": 0}
