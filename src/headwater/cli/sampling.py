"""Sampling flags of `generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.generation import SamplingParams

if TYPE_CHECKING:
    import argparse


def sampling_from(arguments: argparse.Namespace) -> SamplingParams:
    """Raises InvalidRequestError when a flag is out of range."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return SamplingParams(**given, stop=tuple(arguments.stop or ()))
