"""Activations that are not rounded, in native kernels and in torch's reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.kernels import set_exact_activations
from headwater.model.linear import exact_activations


@contextmanager
def exactly() -> Iterator[None]:
    """Native layers made within, and all that the reference computes within, do not round."""
    set_exact_activations(True)
    try:
        with exact_activations():
            yield
    finally:
        set_exact_activations(False)
