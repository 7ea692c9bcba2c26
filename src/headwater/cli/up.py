"""`headwater up`: starts what does not run yet and waits until all is ready."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import grpc

from headwater.cli import stack
from headwater.cli.how_to_use import how_to_use
from headwater.cli.model import with_model
from headwater.cli.progress import progress_bar
from headwater.config import to_toml
from headwater.errors import ConfigError, UnavailableError
from headwater.rpc.channel import callable_address, open_blocking_channel
from headwater.rpc.link import Link
from headwater.rpc.tls import check_names, is_on
from headwater.v1 import memory_service_pb2, memory_service_pb2_grpc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from headwater.cli.processes import ManagedProcess
    from headwater.config import Config

POLL_SECONDS = 0.1
STOP_SECONDS = 5.0


def up(arguments: argparse.Namespace, config: Config) -> int:
    """Starts the stack, or what of it is missing, and prints how to use it."""
    if arguments.model:
        model = dataclasses.replace(config.model, path=arguments.model)
        config = dataclasses.replace(config, model=model)
    if arguments.no_gateway:
        gateway = dataclasses.replace(config.gateway, enabled=False)
        config = dataclasses.replace(config, gateway=gateway)
    _check_tls(config)
    config = with_model(config)
    deadline = time.monotonic() + arguments.timeout
    members = stack.members(config)
    # The gateway asks the router for the tokenizer when it starts, and soon gives up.
    first = [name for name in members if name != stack.GATEWAY]
    started: list[str] = []
    try:
        config_path = _start_missing(config, first, started)
        _follow_loading(config, members["decode"], deadline)
        for name in first:
            _wait_until_serving(name, members[name], config, deadline)
        if config.gateway.enabled:
            _start_missing(config, [stack.GATEWAY], started)
            _wait_until_serving(stack.GATEWAY, members[stack.GATEWAY], config, deadline)
    except BaseException:
        # Half a stack serves nobody, and would keep the next try from other settings.
        for name in reversed(started):
            members[name].stop(STOP_SECONDS)
        raise
    supervisor = stack.supervisor(config)
    if supervisor.pid() is None:
        command = [sys.executable, "-m", "headwater.cli.supervise", "--config", str(config_path)]
        supervisor.start(command, stack.environment_of("supervisor", config))
    print(how_to_use(config, config_path))
    return 0


def _check_tls(config: Config) -> None:
    """Raises ConfigError before any process waits for another that it cannot reach.

    All of them have one certificate.
    """
    if config.gateway.enabled:
        stack.gateway_command_of(config)
    if is_on(config.tls):
        called = [stack.address_of(name, config) for name in stack.SERVICE_NAMES]
        called += [config.prefill.decode_address, config.router.prefill_address]
        called += [config.router.decode_address]
        hosts = (callable_address(address).rpartition(":")[0].strip("[]") for address in called)
        check_names(config.tls, hosts)


def _start_missing(config: Config, names: Sequence[str], started: list[str]) -> Path:
    """Starts those that do not run, and adds them to `started`; returns the written configuration.

    Raises ConfigError when something runs already, with other settings.
    """
    with stack.only_one(config):
        config_path = _write_config(config)
        members = stack.members(config)
        for name in names:
            if members[name].pid() is None:
                command = stack.command_of(name, config, config_path)
                members[name].start(command, stack.environment_of(name, config))
                started.append(name)
    return config_path


def _write_config(config: Config) -> Path:
    """Writes what the processes read.

    Raises ConfigError when some run already, with other settings.
    """
    path = stack.run_dir(config) / "config.toml"
    text = to_toml(config)
    running = [name for name, process in stack.processes(config).items() if process.pid()]
    if running and path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{', '.join(running)} run already, with other settings; stop them with "
            "`headwater down` first, or give this stack its own shm.prefix and ports"
        )
    path.write_text(text, encoding="utf-8")
    return path


def _follow_loading(config: Config, decode: ManagedProcess, deadline: float) -> None:
    """Shows how the weights load; ends when they are there, or when decode does not answer yet."""
    with progress_bar("loading weights") as show:
        while time.monotonic() < deadline and decode.pid() is not None:
            with open_blocking_channel(config.decode.listen, Link.of(config)) as channel:
                stub = memory_service_pb2_grpc.MemoryServiceStub(channel)
                try:
                    for response in stub.GetWeights(memory_service_pb2.GetWeightsRequest()):
                        if response.HasField("manifest"):
                            return
                        if response.HasField("progress") and response.progress.total_bytes:
                            show(response.progress.loaded_bytes, response.progress.total_bytes)
                except grpc.RpcError:
                    time.sleep(POLL_SECONDS)


def _wait_until_serving(
    name: str, process: ManagedProcess, config: Config, deadline: float
) -> None:
    while not stack.is_serving(name, config):
        if process.pid() is None:
            raise UnavailableError(
                f"{name} ended while starting; the end of {process.log_path}:\n{process.log_tail()}"
            )
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{name} is not ready in time; see {process.log_path}, or raise --timeout"
            )
        time.sleep(POLL_SECONDS)
