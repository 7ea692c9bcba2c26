"""Measures what a model's passes take before there is real work to measure them by.

Computes a few made-up tokens into private memory; touches no pool and no lease.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from headwater.kv.layout import KvKind, KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.costs import CostMeter
    from headwater.model.interface import Model

logger = logging.getLogger(__name__)

# The first pass faults pages in and is not counted; two sizes tell pass and token apart.
_SIZES = (64, 1, 64, 1, 64)


def calibrate(model: Model, meter: CostMeter, should_stop: Callable[[], bool]) -> None:
    """Passes of a few sizes, each observed by `meter`; gives way between layers.

    To be called under torch.inference_mode. Raises nothing: without it the first real passes tell.
    """
    try:
        _measure(model, meter, should_stop)
    except Exception:
        logger.exception("the model could not be measured; the first requests will tell its speed")


def _measure(model: Model, meter: CostMeter, should_stop: Callable[[], bool]) -> None:
    most = min(meter.costs.max_tokens_per_pass, max(_SIZES))
    pages = _private_pages(model, most)
    for index, size in enumerate(_SIZES):
        num_tokens = min(size, most)
        batch = Batch.build([SequenceChunk(_tokens(model, num_tokens), 0, (0,))], most)
        began_at = time.monotonic()
        hidden = model.embed(batch.token_ids)
        for layer in range(model.spec.num_layers):
            if should_stop():
                return
            hidden = model.forward_layer(layer, hidden, batch, pages)
        if index:
            meter.observe(num_tokens, time.monotonic() - began_at)
    logger.info(
        "calibrated: %.3g ms per pass and %.3g ms per token",
        1000 * meter.costs.seconds_per_pass,
        1000 * meter.costs.seconds_per_token,
    )


def _tokens(model: Model, count: int) -> list[int]:
    """Different tokens, so that a mixture of experts uses as many of them as a text would."""
    stride = max(1, model.spec.vocab_size // count)
    return [i * stride % model.spec.vocab_size for i in range(count)]


def _private_pages(model: Model, num_tokens: int) -> KvPages:
    """One block that holds all."""
    kv = model.spec.kv
    return KvPages.allocate(
        KvLayout(
            kind=KvKind(kv.kind),
            num_layers=model.spec.num_layers,
            num_blocks=1,
            block_tokens=num_tokens,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            num_slots=1,
            hidden_size=model.spec.hidden_size,
        )
    )
