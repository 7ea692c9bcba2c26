"""How a device's memory is shared out before anything is allocated.

Owns the estimate of what a prompt's activations take, and the order in which rings and prompt
length get what there is. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import ResourceError
from headwater.model.layer_spec import GqaSpec, MlaSpec, MoeFfnSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.gpu.layout import ModelLayout
    from headwater.model.layer_spec import LayerSpec
    from headwater.model.spec import ModelSpec

# Rows of experts' outputs that are kept at once.
MAX_ROWS = 16384
# Experts with more rows than this, on average, are expanded to FP16 once.
EXPANDED_ABOVE = 64
# Tokens that go through norms, gates and dense networks at once.
SLICE_TOKENS = 4096
# Elements of queries, or of keys, of the heads whose attention is computed at once.
HEADS_ELEMENTS = 1 << 26
# A copy of this size runs at the link's full rate, and a ring of a layer still has many slots.
GROUP_BYTES = 256 << 20
# What CUDA, libraries and the allocator's gaps take.
RESERVE_BYTES = 1 << 30
_LEAST_TOKENS = 128
_LEAST_SLOTS = 2
# Layers of experts in a ring that does not hold them all.
_MOST_LAYERS = 3
_GIB = 2**30
# Of a weight, without its share of a scale.
_STORED_BITS = {"none": 16, "fp8": 8, "int4": 4, "mxfp4": 4}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Slots of both rings, tokens per sweep, and what they take, in bytes."""

    dense_slots: int
    expert_slots: int
    max_tokens: int
    ring_bytes: int
    activation_bytes: int


def heads_at_once(num_heads: int, num_keys: int, head_dim: int) -> int:
    """How many heads' keys fit the bound, at least one."""
    return max(1, min(num_heads, HEADS_ELEMENTS // (num_keys * head_dim)))


def token_bytes(spec: ModelSpec, world_size: int = 1) -> int:
    """Device memory per token of a sweep that so many ranks share: a bound over the layers."""
    mine = max(_layer_token_bytes(spec.hidden_size, layer) for layer in spec.layers)
    if world_size == 1:
        return mine
    # A stripe's share; and of all rows: partial sums, what is sent and received of them, and
    # everybody's rows.
    return -(-mine // world_size) + (4 + 4 + 4 + 2 + 2) * spec.hidden_size


def fixed_bytes(spec: ModelSpec) -> int:
    """Device memory that does not depend on the prompt."""
    layers = max(_layer_fixed_bytes(spec.hidden_size, layer) for layer in spec.layers)
    return RESERVE_BYTES + layers + max(_expanded_bytes(spec, layer) for layer in spec.layers)


def plan_memory(
    spec: ModelSpec,
    layout: ModelLayout,
    available_bytes: int,
    wanted_tokens: int,
    *,
    world_size: int = 1,
    others: Sequence[ModelLayout] = (),
) -> MemoryPlan:
    """Shares out `available_bytes` of device memory.

    First the least of everything, then half a layer of expert slots, then tokens as wanted, then a
    whole layer of slots, then the dense weights that copies run ahead over, then all of them, then
    all experts or else some more layers, each as far as it goes. Slots and tokens are as large as
    `layout`, shared by `world_size` ranks, and `others`, shared by none, need them.

    Raises ResourceError when the least does not fit.
    """
    dense_items, dense_bytes = layout.ring_sizes(0)
    expert_items, expert_bytes = layout.ring_sizes(1)
    dense_bytes = max([dense_bytes, *(other.ring_sizes(0)[1] for other in others)])
    expert_bytes = max([expert_bytes, *(other.ring_sizes(1)[1] for other in others)])
    per_layer = max(len(layer.groups) for layer in layout.layers)
    per_token = max(token_bytes(spec, ranks) for ranks in {world_size, 1 if others else world_size})
    dense_slots = min(dense_items, _LEAST_SLOTS)
    expert_slots = min(expert_items, _LEAST_SLOTS)
    least = fixed_bytes(spec) + dense_slots * dense_bytes + expert_slots * expert_bytes
    left = available_bytes - least - _LEAST_TOKENS * per_token
    if left < 0:
        raise ResourceError(
            f"gpu: prefill needs at least {(available_bytes - left) / _GIB:.1f} GiB of device "
            f"memory, {max(0, available_bytes) / _GIB:.1f} GiB are there; raise gpu.vram_gib, free "
            "the device, or set gpu.prefill to off"
        )

    def spend(wanted: int, unit_bytes: int) -> int:
        """As many units of so many bytes as are wanted and still there."""
        nonlocal left
        granted = max(0, min(wanted, left // unit_bytes)) if unit_bytes else 0
        left -= granted * unit_bytes
        return granted

    expert_slots += spend(per_layer // 2 - expert_slots, expert_bytes)
    tokens = _LEAST_TOKENS + spend(wanted_tokens - _LEAST_TOKENS, per_token)
    expert_slots += spend(min(per_layer, expert_items) - expert_slots, expert_bytes)
    dense_slots += spend(_dense_ahead(layout) - dense_slots, dense_bytes)
    for_rest = (dense_items - dense_slots) * dense_bytes
    if for_rest <= left:
        left -= for_rest
        dense_slots = dense_items
    if (expert_items - expert_slots) * expert_bytes <= left:
        expert_slots = expert_items
    else:
        # What is copied ahead while the first layers, which have no experts, are computed.
        most = min(_MOST_LAYERS * per_layer, expert_items)
        expert_slots += spend(most - expert_slots, expert_bytes)
    ring_bytes = dense_slots * dense_bytes + expert_slots * expert_bytes
    return MemoryPlan(
        dense_slots, expert_slots, tokens, ring_bytes, fixed_bytes(spec) + tokens * per_token
    )


def _dense_ahead(layout: ModelLayout) -> int:
    """Dense items that must have slots so that the ring of experts alone bounds the run ahead.

    Copies go on in their order. Where layers without experts follow one another, as they do at the
    beginning, two slots would keep the first experts waiting until these layers have computed.
    """
    longest = run = 0
    for layer in layout.layers:
        run = 0 if layer.groups else run + 1
        longest = max(longest, run)
    return min(len(layout.layers), longest + _LEAST_SLOTS)


def _layer_token_bytes(hidden: int, layer: LayerSpec) -> int:
    attention = layer.attention
    if isinstance(attention, MlaSpec):
        # Compressed queries; latents in FP32 and FP16, with their export.
        kept = 2 * (attention.q_lora_rank or 0) + 8 * (attention.kv_lora_rank + attention.rope_dim)
        kept += 2 * attention.num_heads * attention.v_dim
    else:
        assert isinstance(attention, GqaSpec)
        # Queries in FP32 while they are rotated; keys and values twice.
        kept = attention.head_dim * (10 * attention.num_heads + 20 * attention.num_kv_heads)
    choices = 0
    if isinstance(layer.ffn, MoeFfnSpec):
        choices = 24 * layer.ffn.experts_per_token + 8 * layer.ffn.num_experts
    # The residual stream; normalised in FP16, and again in E4M3 with scales.
    return 4 * hidden + 2 * hidden + 2 * hidden + kept + choices


def _layer_fixed_bytes(hidden: int, layer: LayerSpec) -> int:
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, MlaSpec):
        heads = attention.num_heads * max(attention.v_dim, attention.nope_dim + attention.rope_dim)
    else:
        heads = attention.num_heads * attention.head_dim
    rows = 0
    if isinstance(ffn, MoeFfnSpec):
        rows = MAX_ROWS * (4 * hidden + 2 * ffn.intermediate_size)
        inner = ffn.shared_intermediate_size
    else:
        inner = ffn.intermediate_size
    # Dense weights in FP16: two of attention at once, or all three of a gated network; a slice of
    # tokens before and after them; queries, keys, values and outputs of some heads, with what they
    # are made from.
    weights = 2 * hidden * max(2 * heads, 3 * inner)
    slices = 6 * SLICE_TOKENS * (hidden + 3 * max(heads, inner))
    return weights + slices + 10 * HEADS_ELEMENTS + rows


def _expanded_bytes(spec: ModelSpec, layer: LayerSpec) -> int:
    """A group of routed experts in FP16; see layout.py for how large a group is as it is stored."""
    if not isinstance(layer.ffn, MoeFfnSpec):
        return 0
    ffn, stored_bits = layer.ffn, _STORED_BITS[spec.quant.kind]
    one = 3 * spec.hidden_size * ffn.intermediate_size
    count = max(1, min(ffn.num_experts, GROUP_BYTES * 8 // (one * stored_bits)))
    return 2 * one * count
