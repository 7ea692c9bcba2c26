"""`headwater health`: whether services are ready, for the health checks of containers."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from headwater.cli import stack
from headwater.rpc.channel import callable_address
from headwater.rpc.tls_problem import tls_problem

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config


def health(arguments: argparse.Namespace, config: Config) -> int:
    """Prints a line per service; the exit status is 0 when all are ready and 1 otherwise.

    Without names it is about those that listen here, one at least.
    """
    names = arguments.services or [
        name for name in (*stack.SERVICE_NAMES, stack.GATEWAY) if _listens(name, config)
    ]
    ready = {name: stack.is_serving(name, config) for name in names}
    for name, is_ready in ready.items():
        print(f"{name} {'SERVING' if is_ready else 'NOT_SERVING'}{_why(name, config, is_ready)}")
    if not ready:
        print("no service listens here")
    return 0 if ready and all(ready.values()) else 1


def _why(name: str, config: Config, is_ready: bool) -> str:
    """What is wrong with TLS, if that is why a process seems not to serve."""
    if is_ready or name == stack.GATEWAY:
        return ""
    problem = tls_problem(callable_address(stack.address_of(name, config)), config.tls)
    return f": {problem}" if problem else ""


def _listens(name: str, config: Config) -> bool:
    # A wildcard address, such as 0.0.0.0, leads to this machine itself.
    host, _, port = stack.address_of(name, config).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), stack.PROBE_SECONDS):
            return True
    except OSError:
        return False
