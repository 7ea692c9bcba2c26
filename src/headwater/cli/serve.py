"""`headwater serve`: one process in the foreground, as containers run it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from headwater.cli import stack
from headwater.cli.model import with_model
from headwater.rpc import process

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config


def serve(arguments: argparse.Namespace, config: Config) -> int:
    """Runs until SIGTERM."""
    if arguments.service == stack.GATEWAY:
        command = stack.gateway_command_of(config)
        os.execve(command[0], command, stack.environment_of(stack.GATEWAY, config))
    if arguments.service != "prefill":
        config = with_model(config)
    service = importlib.import_module(f"headwater.services.{arguments.service}.service")
    process.serve(arguments.service, service.run, config)
    return 0
