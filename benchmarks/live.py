"""Live stacks for benchmarks: real processes on free ports, and nothing of them left afterwards."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.model import with_model
from headwater.config import load_config
from headwater.shm import list_segments, reap
from tests.integration.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def default_model() -> Path:
    """The folder of the embedded default model, converted if it has not been yet."""
    config = load_config(config_file=None, environ=os.environ)
    return Path(with_model(config).model.path)


@contextlib.contextmanager
def live_stack(
    checkpoint: Path,
    folder: Path,
    *settings: str,
    cpus: Mapping[str, str] | None = None,
    name: str = "one",
) -> Iterator[Stack]:
    """A running stack with its logs in `folder`; all cores are its to use, or those in `cpus`.

    Stacks that run at once need a `name` each.
    """
    prefix = f"hwbench-{name}-{os.getpid()}"
    cores = len(os.sched_getaffinity(0))
    threads = (f"decode.threads={cores}", f"prefill.threads={cores}", "router.prompt_path=auto")
    stack = Stack(checkpoint, prefix, folder, [*threads, *settings], cpus)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        reap(f"{prefix}.", release_weights=True)
    assert list_segments(f"{prefix}.") == []
