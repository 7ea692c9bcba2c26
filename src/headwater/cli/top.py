"""`headwater top`: a live view of a running stack; what it shows comes from the status replies."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from headwater.cli.process_use import ProcessUse
from headwater.cli.status import read_states
from headwater.cli.top_view import render

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from headwater.config import Config

_LEAST_SECONDS = 0.1


def top(arguments: argparse.Namespace, config: Config) -> int:
    """Shows the stack until it is interrupted; with --once a single look."""
    use = ProcessUse()
    if arguments.once:
        Console().print(_look(config, use))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(_look(config, use), refresh=True)
            time.sleep(max(arguments.interval, _LEAST_SECONDS))
    return 0


def _look(config: Config, use: ProcessUse) -> RenderableType:
    states = read_states(config)
    uses = {name: use.of(name, state.get("pid")) for name, state in states.items()}
    return render(states, uses)
