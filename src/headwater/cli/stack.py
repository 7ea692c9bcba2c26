"""The processes of one stack: their commands, their health, and where their files are."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.cli.processes import ManagedProcess
from headwater.config.sources import ENV_PREFIX
from headwater.errors import ConfigError
from headwater.gateway import (
    gateway_command,
    gateway_environment,
    gateway_not_ready_reason,
)
from headwater.gateway_protection import Protection
from headwater.rpc.channel import open_blocking_channel
from headwater.rpc.link import Link
from headwater.rpc.tls import is_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.config import Config

SERVICE_NAMES = {
    "decode": "headwater.v1.DecodeService",
    "prefill": "headwater.v1.PrefillService",
    "router": "headwater.v1.RouterService",
}
GATEWAY = "gateway"
PROBE_SECONDS = 2.0


def run_dir(config: Config) -> Path:
    """Where the stack keeps pids, logs and its configuration; one folder per prefix."""
    return Path(config.state.run_dir).expanduser() / config.shm.prefix


def processes(config: Config) -> dict[str, ManagedProcess]:
    """All processes a stack may have, in the order they are started."""
    names = (*SERVICE_NAMES, GATEWAY)
    return {name: ManagedProcess(name, run_dir(config)) for name in names}


def members(config: Config) -> dict[str, ManagedProcess]:
    """The processes that this configuration wants to run."""
    return {
        name: process
        for name, process in processes(config).items()
        if name != GATEWAY or config.gateway.enabled
    }


def supervisor(config: Config) -> ManagedProcess:
    """The process that restarts the others."""
    return ManagedProcess("supervisor", run_dir(config))


@contextmanager
def only_one(config: Config) -> Iterator[None]:
    """Keeps others from starting processes of the same stack meanwhile."""
    folder = run_dir(config)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def command_of(name: str, config: Config, config_path: Path) -> list[str]:
    """The command line of a process."""
    if name == GATEWAY:
        return gateway_command_of(config)
    return [sys.executable, "-m", f"headwater.services.{name}", "--config", str(config_path)]


def gateway_command_of(config: Config) -> list[str]:
    """The command line of the gateway.

    Raises ConfigError when it cannot be used, or the router speaks nothing but TLS.
    """
    own_router = config.router.plain_listen
    if not own_router and not config.gateway.routers and is_on(config.tls):
        raise ConfigError(
            "router.plain_listen: is empty, and the gateway speaks no TLS to routers; set it to an "
            "address on this machine, such as 127.0.0.1:50049, or gateway.enabled to false"
        )
    own_router = own_router or config.router.listen
    routers = [address.strip() for address in config.gateway.routers.split(",")]
    return gateway_command(
        listen=config.gateway.listen,
        metrics_listen=config.gateway.metrics_listen,
        router_addresses=routers if config.gateway.routers else [own_router],
        otlp_endpoint=config.telemetry.otlp_endpoint,
        protection=Protection.of(config),
    )


def environment_of(name: str, config: Config) -> dict[str, str]:
    """This environment without our settings: the processes read them from the written file."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    is_gateway = name == GATEWAY
    return gateway_environment(environ, config.telemetry.trace_ratio) if is_gateway else environ


def address_of(name: str, config: Config) -> str:
    """Where a process listens."""
    address: str = getattr(config, name).listen
    return address


def is_serving(name: str, config: Config) -> bool:
    """Whether a process is ready for work."""
    if name == GATEWAY:
        return gateway_not_ready_reason(config.gateway.listen, config.gateway.tls_cert) is None
    with open_blocking_channel(address_of(name, config), Link.of(config)) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAMES[name])
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_SECONDS)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
