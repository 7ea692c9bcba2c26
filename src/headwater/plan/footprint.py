"""What a model weighs, reads and computes, per token and in all: from its config.json alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.gpu.decode_plan import cache_token_bytes, resident_bytes
from headwater.model.layer_spec import MlaSpec, MoeFfnSpec
from headwater.weights.tensors import DType

if TYPE_CHECKING:
    from headwater.model.spec import ModelSpec
    from headwater.weights.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes and operations of a model.

    `streamed_bytes` are all layers, what a sweep brings to the GPU; of these `expert_bytes` are
    routed experts, of `num_routed` layers, and `expert_elements` their weights. `serial_bytes` are
    what the GPU reads in a decode step while the CPU waits: all that is neither a routed nor a
    shared expert. `token_flops` are the products of one token with the layers' weights,
    `pair_flops` those of two tokens in attention.
    With `has_latents` the cache holds what all heads share instead of keys and values.
    """

    num_layers: int
    num_routed: int
    num_experts: int
    experts_per_token: int
    hidden_size: int
    weight_bytes: int
    streamed_bytes: int
    expert_bytes: int
    expert_elements: int
    serial_bytes: int
    dense_bytes: int
    resident_bytes: int
    token_flops: float
    pair_flops: float
    kv_token_bytes: int
    has_latents: bool

    def chosen_bytes(self, num_tokens: float) -> float:
        """Routed experts that so many tokens read, if all are equally likely."""
        if not self.num_routed:
            return 0.0
        missed: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.expert_bytes * (1 - missed)


def footprint_of(spec: ModelSpec) -> Footprint:
    """From the tensors that the model's segment would hold."""
    routed = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeFfnSpec)]
    weight = streamed = experts = shared = expert_elements = 0
    flops = 0.0
    stored = []
    for tensor in spec.tensors():
        item_bytes, elements = _dtype(tensor).item_bytes, math.prod(tensor.shape)
        num_bytes = elements * item_bytes
        stored.append((tensor.name, elements, item_bytes))
        weight += num_bytes
        if tensor.name.startswith("layers."):
            streamed += num_bytes
        used = 1.0
        if ".experts." in tensor.name:
            experts += num_bytes
            used = routed[0].experts_per_token / routed[0].num_experts
        elif ".shared." in tensor.name:
            shared += num_bytes
        is_linear = len(tensor.shape) > 1 and not tensor.name.endswith((".scale", ".zero"))
        if is_linear and tensor.name.startswith("layers."):
            # Bytes of two codes are two weights.
            elements *= 2 if _dtype(tensor) is DType.U8 else 1
            flops += 2 * used * elements
            expert_elements += elements if ".experts." in tensor.name else 0
    looked_up = 0 if spec.is_embedding_tied else stored[0][1] * stored[0][2]
    return Footprint(
        num_layers=spec.num_layers,
        num_routed=len(routed),
        num_experts=routed[0].num_experts if routed else 0,
        experts_per_token=routed[0].experts_per_token if routed else 0,
        hidden_size=spec.hidden_size,
        weight_bytes=weight,
        streamed_bytes=streamed,
        expert_bytes=experts,
        expert_elements=expert_elements,
        serial_bytes=weight - experts - shared - looked_up,
        dense_bytes=weight - experts - looked_up,
        resident_bytes=resident_bytes(spec, stored),
        token_flops=flops,
        pair_flops=sum(_pair_flops(layer.attention) for layer in spec.layers),
        kv_token_bytes=cache_token_bytes(spec),
        has_latents=isinstance(spec.layers[0].attention, MlaSpec),
    )


def _dtype(tensor: TensorSpec) -> DType:
    """BF16 where a tensor may be BF16; what only has encodings lies in bytes of two codes."""
    if DType.BF16 in tensor.dtypes:
        return DType.BF16
    return tensor.dtypes[0] if tensor.dtypes else DType.U8


def _pair_flops(attention: object) -> float:
    """Scores and sums of one query and one key, over all heads; MLA un-absorbed."""
    if isinstance(attention, MlaSpec):
        width = attention.nope_dim + attention.rope_dim + attention.v_dim
        return 2.0 * attention.num_heads * width
    heads: int = attention.num_heads  # type: ignore[attr-defined]
    return 4.0 * heads * attention.head_dim  # type: ignore[attr-defined,no-any-return]
