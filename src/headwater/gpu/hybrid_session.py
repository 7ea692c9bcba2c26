"""Everything that hybrid decoding needs on a device, made in one go.

Owns the order: what fits is planned before anything is allocated, the card is looked at, and what
first steps would allocate or compile is there before the first request.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from headwater.errors import ResourceError
from headwater.gpu.attention_check import check_attention
from headwater.gpu.decode_plan import plan_decode, resident_bytes
from headwater.gpu.device import give_back
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.hybrid_model import HybridModel

if TYPE_CHECKING:
    from headwater.kernels import WorkerPool
    from headwater.model.interface import Model
    from headwater.model.source import Weights

logger = logging.getLogger(__name__)

_GIB = 2**30


def start_hybrid(
    on_cpu: Model,
    weights: Weights,
    pool: WorkerPool,
    device: torch.device,
    *,
    available_bytes: int,
    max_batch: int,
    max_context: int,
) -> HybridModel:
    """A HybridModel in no more than `available_bytes` of `device`; on a CPU, for tests, likewise.

    Raises ResourceError when they do not do, ConfigError for weights that the kernels do not know.
    """
    spec, began_at = on_cpu.spec, time.monotonic()
    stored = []
    for tensor in spec.tensors():
        if ".experts." not in tensor.name:
            found = weights.tensor(tensor.name)
            stored.append((tensor.name, found.numel(), found.element_size()))
    plan = plan_decode(
        spec,
        resident_bytes(spec, stored),
        available_bytes,
        wanted_rows=max_batch,
        wanted_context=max_context,
    )
    try:
        with torch.inference_mode():
            if device.type == "cuda":
                check_attention(spec, device)
                give_back()
            decoder = HybridDecoder(
                spec,
                weights,
                pool,
                device,
                max_rows=plan.rows,
                max_context=plan.context,
                lanes=2 if plan.rows > 1 else 1,
            )
            decoder.warm_up()
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{device}: no room for the {plan.total_bytes / _GIB:.1f} GiB that decode planned; "
            "lower gpu.decode_vram_gib or decode.max_batch, or free the device's memory"
        ) from error
    except RuntimeError as error:
        # CUDA's and Triton's own; their first line says what, the others where.
        reason = str(error).partition("\n")[0]
        raise ResourceError(f"{device}: decode cannot use it: {reason}") from error
    logger.info(
        "answers are computed on %s and CPU: %.1f GiB of weights there, room for %d sequences of "
        "%d tokens in %.1f GiB; ready after %.1f s",
        device,
        plan.weight_bytes / _GIB,
        plan.rows,
        plan.context,
        plan.cache_bytes / _GIB,
        time.monotonic() - began_at,
    )
    return HybridModel(decoder, on_cpu)
