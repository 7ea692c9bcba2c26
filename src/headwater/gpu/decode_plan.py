"""How a device's memory is shared out for hybrid decoding. Pure arithmetic.

Owns the estimate of what the resident weights and a step take, and how many sequences of which
length the rest holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import ResourceError
from headwater.gpu.memory_plan import RESERVE_BYTES
from headwater.kv.layout import KV_ITEM_BYTES, KvKind
from headwater.model.layer_spec import GqaSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headwater.model.spec import ModelSpec

# The kernel for products of few tokens takes no more; see kernels/few_rows.py.
MOST_ROWS = 64
# A shorter context than this is given up only when there is no other way.
_GOOD_CONTEXT = 8192
_LEAST_CONTEXT = 256
# Contexts are multiples of this.
_STEP = 256
_PROGRAM_POSITIONS = 1024
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows of the cache, tokens in each, and what everything takes, in bytes."""

    rows: int
    context: int
    weight_bytes: int
    cache_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it, CUDA's own share included."""
        return self.weight_bytes + self.cache_bytes + self.scratch_bytes + RESERVE_BYTES


def resident_bytes(spec: ModelSpec, stored: Iterable[tuple[str, int, int]]) -> int:
    """Device memory of everything but routed experts and a looked-up embedding.

    `stored` are names, elements and bytes per element as they lie in host memory. E4M3 stays as it
    is; what has four bits becomes FP16, two values from each byte; scales and norms are FP32. The
    matrix kv_b of MLA is kept in FP16, as keys and as values.
    """
    total = 0
    for name, count, item_bytes in stored:
        if ".experts." in name or (name == "embed" and not spec.is_embedding_tied):
            continue
        if name.endswith(".attention.kv_b"):
            total += 2 * count * KV_ITEM_BYTES
        elif item_bytes == 1:
            total += count if spec.quant.kind == "fp8" else 4 * count
        else:
            total += count * item_bytes
    return total


def cache_token_bytes(spec: ModelSpec) -> int:
    """Keys and values of one token in all layers."""
    vectors = 1 if spec.kv.kind is KvKind.MLA else 2 * spec.kv.num_kv_heads
    return spec.num_layers * vectors * spec.kv.head_dim * KV_ITEM_BYTES


def plan_decode(
    spec: ModelSpec,
    weight_bytes: int,
    available_bytes: int,
    *,
    wanted_rows: int,
    wanted_context: int,
) -> DecodePlan:
    """Shares out `available_bytes`: rows as wanted if each can be 8192 tokens long, else fewer.

    Raises ResourceError when not even one short sequence fits.
    """
    per_row = max(_scratch_per_context(spec), 1)
    token_bytes = cache_token_bytes(spec)

    def needed(rows: int, context: int) -> int:
        return rows * context * (token_bytes + per_row)

    wanted_context = max(_LEAST_CONTEXT, -(-wanted_context // _STEP) * _STEP)
    left = available_bytes - weight_bytes - RESERVE_BYTES
    if needed(1, _LEAST_CONTEXT) > left:
        least = (available_bytes - left + needed(1, _LEAST_CONTEXT)) / _GIB
        raise ResourceError(
            f"gpu: decode needs at least {math.ceil(10 * least) / 10:.1f} GiB of device memory, "
            f"{max(0, available_bytes) / _GIB:.1f} GiB are there; raise gpu.decode_vram_gib, free "
            "the device, or set gpu.decode to off"
        )
    good = min(wanted_context, _GOOD_CONTEXT)
    rows = max(1, min(wanted_rows, MOST_ROWS, left // needed(1, good)))
    context = min(wanted_context, left // needed(rows, 1) // _STEP * _STEP)
    return DecodePlan(
        rows, context, weight_bytes, rows * context * token_bytes, rows * context * per_row
    )


def _scratch_per_context(spec: ModelSpec) -> int:
    """Bytes of a step per row and token of context: FP32 sums of attention's programs.

    Each has so many positions (see kernels/attend.py), unless fewer give a card enough to do;
    those sums are within the reserve.
    """
    most = 0
    for layer in spec.layers:
        attention = layer.attention
        width = attention.head_dim if isinstance(attention, GqaSpec) else attention.kv_lora_rank
        most = max(most, 4 * attention.num_heads * (width + 2) // _PROGRAM_POSITIONS)
    return most
