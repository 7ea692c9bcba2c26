"""What the three service processes do alike: read the configuration, log, trace, run, report."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

import uvloop

from headwater.config import load_config
from headwater.errors import HeadwaterError
from headwater.telemetry.logs import configure_logging
from headwater.telemetry.setup import telemetry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headwater.config import Config
    from headwater.telemetry.metric import Process

logger = logging.getLogger(__name__)


def main(name: Process, run: Callable[[Config], Awaitable[None]]) -> None:
    """Runs a service until it ends; exits with 1 and one clear line when it cannot."""
    parser = argparse.ArgumentParser(prog=f"python -m headwater.services.{name}")
    parser.add_argument("--config", help="TOML file with settings")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    try:
        config = load_config(
            config_file=arguments.config, environ=os.environ, assignments=arguments.set
        )
        serve(name, run, config)
    except HeadwaterError as error:
        sys.exit(f"headwater {name}: {error}")


def serve(name: Process, run: Callable[[Config], Awaitable[None]], config: Config) -> None:
    """Runs a service with logging and telemetry. Raises HeadwaterError when it cannot start."""
    configure_logging(name, config.telemetry)
    with telemetry(name, config.telemetry):
        uvloop.run(_as_coroutine(run, config))


async def _as_coroutine(run: Callable[[Config], Awaitable[None]], config: Config) -> None:
    await run(config)
