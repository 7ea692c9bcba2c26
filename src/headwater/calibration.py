"""Measures what a model's passes take before there is real work to measure them by.

Computes a few made-up tokens into private memory; touches no pool and no lease.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headwater.model.interface import Model

logger = logging.getLogger(__name__)

# Two sizes tell apart what a pass and what a token takes.
PROMPT_SIZES = (64, 1)
STEP_SIZES = (1, 4)
# The first pass faults pages in, and any may be disturbed: the fastest of each size counts.
_ROUNDS = 3


def calibrate(
    model: Model,
    sizes: Sequence[int],
    observe: Callable[[int, float], None],
    should_stop: Callable[[], bool],
) -> None:
    """Tells `observe` what passes over prompts of `sizes` tokens take; gives way between layers.

    To be called under torch.inference_mode. Raises nothing: without it the first real passes tell.
    """

    def run(size: int, pages: KvPages) -> bool:
        batch = Batch.build([SequenceChunk(_tokens(model, size), 0, (0,))], pages.block_tokens)
        hidden = model.embed(batch.token_ids)
        for layer in range(model.spec.num_layers):
            if should_stop():
                return False
            hidden = model.forward_layer(layer, hidden, batch, pages)
        return True

    _measure(sizes, lambda: _private_pages(model, 1, max(sizes)), run, observe)


def calibrate_steps(
    model: Model,
    sizes: Sequence[int],
    observe: Callable[[int, float], None],
    should_stop: Callable[[], bool],
) -> None:
    """The same of steps that compute one token each of so many sequences; gives way between."""

    def run(size: int, pages: KvPages) -> bool:
        chunks = [
            SequenceChunk((token,), 0, (i,), sequence_id=-1 - i)
            for i, token in enumerate(_tokens(model, size))
        ]
        if should_stop():
            return False
        model.forward(Batch.build(chunks, pages.block_tokens), pages)
        return True

    _measure(sizes, lambda: _private_pages(model, max(sizes), 1), run, observe)


def _measure(
    sizes: Sequence[int],
    make_pages: Callable[[], KvPages],
    run: Callable[[int, KvPages], bool],
    observe: Callable[[int, float], None],
) -> None:
    """Tells the fastest of some runs of each size, unless one of them ends with False."""
    try:
        pages = make_pages()
        fastest = dict.fromkeys(sizes, math.inf)
        for size in tuple(sizes) * _ROUNDS:
            began_at = time.monotonic()
            if not run(size, pages):
                return
            fastest[size] = min(fastest[size], time.monotonic() - began_at)
    except Exception:
        logger.exception("the model could not be measured; the first requests will tell its speed")
        return
    for size, seconds in tuple(fastest.items()) * _ROUNDS:
        logger.debug("calibration: %d tokens take %.3g ms", size, 1000 * seconds)
        observe(size, seconds)


def _tokens(model: Model, count: int) -> list[int]:
    """Different tokens, so that a mixture of experts uses as many of them as a text would."""
    stride = max(1, model.spec.vocab_size // count)
    return [i * stride % model.spec.vocab_size for i in range(count)]


def _private_pages(model: Model, num_blocks: int, block_tokens: int) -> KvPages:
    layout = KvLayout.of(model.spec, num_blocks=num_blocks, block_tokens=block_tokens)
    return KvPages.allocate(layout)
