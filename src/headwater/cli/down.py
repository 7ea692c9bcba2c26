"""`headwater down`: stops the processes and cleans up after those that died."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.cli import stack
from headwater.shm import reap

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config

KILL_AFTER_SECONDS = 5.0


def down(arguments: argparse.Namespace, config: Config) -> int:
    """Stops the stack in the reverse order of its start, after what would start it again."""
    stack.supervisor(config).stop(KILL_AFTER_SECONDS)
    for name, process in reversed(stack.processes(config).items()):
        grace = 0.0 if name == stack.GATEWAY else getattr(config, name).grace_seconds
        if process.stop(grace + KILL_AFTER_SECONDS):
            print(f"stopped {name}")
    for segment in reap(config.shm.name_prefix, release_weights=arguments.release):
        print(f"removed /dev/shm/{segment}")
    return 0
