"""Which of two lanes' kernels a GPU runs first, when both have some.

Owns the two levels. A lane's queue has precedence; attention over long contexts, which fills a card
for a while, yields to it, so that the other lane's short kernels, for whose results the CPU waits,
get the next place that is free. A captured graph keeps this.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_HIGH, _LOW = -1, 0


def lane_queue(device: torch.device) -> Any:
    """A new CUDA stream with precedence."""
    return torch.cuda.Stream(device, priority=_HIGH)


@contextmanager
def yielding(device: torch.device) -> Iterator[None]:
    """Kernels within come after all that is queued, and give way to other lanes'."""
    if device.type != "cuda":
        yield
        return
    own, background = torch.cuda.current_stream(device), _background(device)
    background.wait_stream(own)
    with torch.cuda.stream(background):
        yield
    own.wait_stream(background)


@functools.cache
def _background(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=_LOW)
