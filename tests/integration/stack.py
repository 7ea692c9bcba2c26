"""A live stack for tests: real processes on free ports, with their own segments."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.rpc.channel import open_blocking_channel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVICES = {
    "decode": "headwater.v1.DecodeService",
    "prefill": "headwater.v1.PrefillService",
    "router": "headwater.v1.RouterService",
}
START_SECONDS = 90.0


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Stack:
    """prefill, decode and router for one model; `settings` are "section.key=value".

    `cpus` keeps processes on the named CPUs, as `taskset` writes them.
    """

    def __init__(
        self,
        model: Path,
        shm_prefix: str,
        log_dir: Path,
        settings: list[str],
        cpus: Mapping[str, str] | None = None,
    ) -> None:
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in SERVICES}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.first_pids: dict[str, int] = {}
        self._log_dir = log_dir
        self._cpus = dict(cpus or {})
        self._settings = [
            f"model.path={model}",
            "model.name=tiny",
            f"shm.prefix={shm_prefix}",
            "kv.pool_tokens=4096",
            "decode.threads=1",
            "prefill.threads=1",
            # Left to itself the router chooses by what it measures, which tests cannot foretell.
            "router.prompt_path=prefill",
            f"decode.listen={self.addresses['decode']}",
            f"prefill.listen={self.addresses['prefill']}",
            f"prefill.decode_address={self.addresses['decode']}",
            f"router.listen={self.addresses['router']}",
            f"router.prefill_address={self.addresses['prefill']}",
            f"router.decode_address={self.addresses['decode']}",
            *settings,
        ]

    def override(self, *settings: str) -> None:
        """Adds settings for the processes started from now on; later ones win."""
        self._settings += settings

    def start(self, *names: str) -> None:
        """Starts the named processes, all if none is named, and waits until they serve."""
        for name in names or tuple(SERVICES):
            self.spawn(name)
        for name in SERVICES:
            if name in self.processes:
                self.wait_until_serving(name)

    def spawn(self, name: str) -> None:
        """Starts a process without waiting for it."""
        command = [sys.executable, "-m", f"headwater.services.{name}"]
        if name in self._cpus:
            command = ["taskset", "-c", self._cpus[name], *command]
        for setting in self._settings:
            command += ["--set", setting]
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.processes[name] = process
        self.first_pids.setdefault(name, process.pid)

    def wait_until_serving(self, name: str, seconds: float = START_SECONDS) -> None:
        """Returns once the process says SERVING; fails with its log otherwise."""
        with open_blocking_channel(self.addresses[name]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICES[name]),
                timeout=seconds,
                wait_for_ready=True,
            )
            try:
                for reply in watch:
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.RpcError as failure:
                raise AssertionError(
                    f"{name} does not serve: {failure}\n{self.log(name)}"
                ) from failure
            finally:
                watch.cancel()

    def kill(self, name: str) -> None:
        """kill -9, and waits until it is dead."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """SIGTERM to all; fails when one does not end by itself."""
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{name} ignored SIGTERM\n{self.log(name)}") from None
        self.processes.clear()

    def log_path(self, name: str) -> Path:
        """Where the output of a process goes."""
        return self._log_dir / f"{name}.log"

    def log(self, name: str) -> str:
        """All output of a process so far."""
        return self.log_path(name).read_text(errors="replace")
