"""Restarts the processes of a stack that die or hang; `headwater up` starts it, in the background.

What it did is written to <run_dir>/supervisor.json, for `headwater status`.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli import stack
from headwater.cli.pulse import Pulse
from headwater.config import load_config
from headwater.errors import ConfigError
from headwater.rpc.link import Link
from headwater.telemetry.logs import configure_logging
from headwater.telemetry.metrics import observe
from headwater.telemetry.setup import telemetry

if TYPE_CHECKING:
    from headwater.cli.processes import ManagedProcess
    from headwater.config import Config
    from headwater.telemetry.metrics import Reading

logger = logging.getLogger(__name__)

RECORD_FILE = "supervisor.json"
CHECK_SECONDS = 0.25
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# A process that ran this long was well; its next death starts from the first back-off.
STABLE_SECONDS = 60.0
# A process that leaves so many questions in a row without an answer, for half a minute, hangs.
MAX_UNANSWERED = 10


@dataclass(slots=True)
class Restarts:
    """How often a process was restarted, and when next; times are Unix seconds."""

    count: int = 0
    last_death: float = 0.0
    next_start: float = 0.0
    backoff_seconds: float = FIRST_BACKOFF_SECONDS

    def died(self, now: float) -> None:
        """Plans the next start."""
        if now - self.last_death > STABLE_SECONDS:
            self.backoff_seconds = FIRST_BACKOFF_SECONDS
        self.last_death = now
        self.next_start = now + self.backoff_seconds
        self.backoff_seconds = min(2 * self.backoff_seconds, MAX_BACKOFF_SECONDS)


class Supervisor:
    """Watches the members of one stack; `check` is one look at all of them."""

    def __init__(self, config: Config, config_path: Path) -> None:
        self._config = config
        self._config_path = config_path
        self._members = stack.members(config)
        self._restarts = {name: Restarts() for name in self._members}
        self._dead: set[str] = set()
        # The gateway has no gRPC, and has never been seen to hang.
        self._pulses = {
            name: Pulse(stack.address_of(name, config), Link.of(config))
            for name in self._members
            if name != stack.GATEWAY
        }
        self._write_record()

    def check(self, now: float) -> None:
        """Ends what hangs, and starts again what has been dead for its back-off."""
        for name, process in self._members.items():
            if process.pid() is not None:
                self._dead.discard(name)
                self._check_pulse(name, process)
            elif name not in self._dead:
                self._dead.add(name)
                self._restarts[name].died(now)
                logger.warning(
                    "%s died; it is started again in %.1f s",
                    name,
                    self._restarts[name].next_start - now,
                )
                self._write_record()
            elif now >= self._restarts[name].next_start:
                self._start(name, process, now)

    def observe(self) -> None:
        """Exports restarts, and who runs."""

        def restarts() -> Reading:
            return [(found.count, {"process": name}) for name, found in self._restarts.items()]

        def up() -> Reading:
            return [
                (int(member.pid() is not None), {"process": name})
                for name, member in self._members.items()
            ]

        observe({"headwater.supervisor.restarts": restarts, "headwater.supervisor.process_up": up})

    def _check_pulse(self, name: str, process: ManagedProcess) -> None:
        pulse = self._pulses.get(name)
        if pulse is None:
            return
        pulse.look()
        if pulse.num_unanswered >= MAX_UNANSWERED:
            logger.warning("%s left %d questions unanswered; it is killed", name, MAX_UNANSWERED)
            pulse.num_unanswered = 0
            process.kill()

    def _start(self, name: str, process: ManagedProcess, now: float) -> None:
        try:
            command = stack.command_of(name, self._config, self._config_path)
        except ConfigError as error:
            # A certificate has expired since; whoever replaces it need not start anything.
            logger.error("%s cannot be started again: %s", name, error)
            self._restarts[name].died(now)
            return
        # Not while `headwater up` starts what is missing.
        with stack.only_one(self._config):
            if process.pid() is None:
                process.start(command, stack.environment_of(name, self._config))
                self._restarts[name].count += 1
                logger.info(
                    "%s is started again, for the %d. time", name, self._restarts[name].count
                )
        self._dead.discard(name)
        self._write_record()

    def _write_record(self) -> None:
        record = {name: asdict(restarts) for name, restarts in self._restarts.items()}
        path = stack.run_dir(self._config) / RECORD_FILE
        # Replaced as a whole, so that a reader never sees half of it.
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(path)


def read_restarts(config: Config) -> dict[str, int]:
    """How often each process was restarted; empty when no supervisor has run."""
    try:
        text = (stack.run_dir(config) / RECORD_FILE).read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: restarts["count"] for name, restarts in json.loads(text).items()}


def main() -> None:
    """Supervises until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m headwater.cli.supervise")
    parser.add_argument("--config", type=Path, required=True)
    config_path = parser.parse_args().config
    config = load_config(config_file=str(config_path), environ={})
    configure_logging("supervisor", config.telemetry)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    supervisor = Supervisor(config, config_path)
    with telemetry("supervisor", config.telemetry):
        supervisor.observe()
        while not stop.wait(CHECK_SECONDS):
            supervisor.check(time.time())


if __name__ == "__main__":
    main()
