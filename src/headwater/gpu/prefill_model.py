"""StreamedModel: prompts on a GPU that holds a small part of the weights.

Owns a sweep: layer after layer, weights arrive while earlier ones compute. It has the face of
headwater.model.interface.Model; hidden states stay on the device between layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.errors import ResourceError
from headwater.gpu.attention import add_attention, normalised
from headwater.gpu.dense import DenseWeights, add_gated_network
from headwater.gpu.kv_export import KvExport
from headwater.gpu.layout import DENSE_RING, EXPERT_RING, ModelLayout, expert_range, view_parts
from headwater.gpu.memory_plan import SLICE_TOKENS, MemoryPlan
from headwater.gpu.positions import Positions
from headwater.gpu.ring import Ring
from headwater.gpu.routed_experts import add_routed_experts
from headwater.gpu.routing import gate, route
from headwater.gpu.streamer import Streamer
from headwater.gpu.streams import Queues
from headwater.model.layer_spec import MoeFfnSpec

if TYPE_CHECKING:
    from headwater.gpu.streamer import HostRanges
    from headwater.kv.pages import KvPages
    from headwater.model.batch import Batch
    from headwater.model.layer_spec import RopeSpec
    from headwater.model.rope import RotaryTable
    from headwater.model.source import Weights
    from headwater.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Share:
    """Which experts this process streams: those of `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1


class StreamedModel:
    """A decoder-only model over `weights` on the host; `layout` and `plan` say what goes where.

    Sweeps of `quantize_from` tokens or more round activations that meet FP8 experts to E4M3, which
    is faster; shorter ones, bound by the link, gain nothing from that and keep BF16.

    Raises ResourceError when the device has no room for the rings. One thread at a time may call.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layout: ModelLayout,
        plan: MemoryPlan,
        queues: Queues,
        *,
        ranges: HostRanges | None = None,
        quantize_from: int = 0,
        share: Share | None = None,
    ) -> None:
        self.spec = spec
        self.device = queues.device
        self.max_tokens = plan.max_tokens
        self._weights = weights
        self._layout = layout
        self._quantize_from = quantize_from
        self._share = share or Share()
        rings = []
        for ring, slots in ((DENSE_RING, plan.dense_slots), (EXPERT_RING, plan.expert_slots)):
            num_items, slot_bytes = layout.ring_sizes(ring)
            rings.append(Ring(num_items, slots, slot_bytes, self.device))
        self.streamer = Streamer(layout.items, rings, queues, ranges)
        self._export = KvExport(self.device)
        self._tables: dict[RopeSpec, RotaryTable] = {}
        self._positions: Positions | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] on the host -> FP32 [T, hidden] on the device; begins a sweep."""
        self.streamer.reset()
        if self.device.type == "cuda":
            # Triton launches on the thread's own current device.
            torch.cuda.set_device(self.device)
        return self._weights.tensor("embed")[token_ids].to(self.device).float()

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """One layer, in place: FP32 [T, hidden] on the device. The layer's KV is in `pages` after.

        Before the last layer the device may still compute when this returns.

        Raises ResourceError when the device's memory does not do, which harms this sweep alone.
        """
        try:
            self._compute_layer(index, hidden, batch, pages)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{self.device}: out of memory in a sweep of {len(hidden)} tokens; lower "
                "gpu.sweep_tokens or gpu.vram_gib, or free the device's memory"
            ) from error
        if index == self.spec.num_layers - 1:
            self.streamer.queues.mark_computed().synchronize()
        return hidden

    def _compute_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> None:
        spec, layer = self.spec.layers[index], self._layout.layers[index]
        parts = self.streamer.take(layer.dense_key)
        weights = DenseWeights(
            view_parts(parts, layer.dense_views),
            self.spec.norm_eps,
            is_exact=not self._is_quantized(hidden),
        )
        positions = self._positions_of(batch)
        add_attention(spec.attention, index, hidden, weights, batch, positions, pages, self._export)
        if isinstance(spec.ffn, MoeFfnSpec):
            self._add_routed(index, spec.ffn, hidden, weights)
        else:
            x = normalised(hidden, weights, "ffn_norm")
            add_gated_network(hidden, x, weights, "ffn", SLICE_TOKENS)
            self.streamer.release()
        self._export.finish(index, batch, pages)

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """All layers over the batch's tokens: hidden states before the final norm, [T, hidden]."""
        hidden = self.embed(batch.token_ids)
        for index in range(self.spec.num_layers):
            hidden = self.forward_layer(index, hidden, batch, pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer, FP32 [n, hidden] -> FP32 [n, vocabulary].

        The head is copied for each call: prefill never samples, so it has no place of its own.
        """
        name = "embed" if self.spec.is_embedding_tied else "lm_head"
        names = [name, f"{name}.scale", f"{name}.zero", "final_norm"]
        tensors = {n: self._weights.tensor(n).to(self.device) for n in names if n in self._weights}
        head = DenseWeights(tensors, self.spec.norm_eps, is_exact=True)
        hidden = hidden.to(self.device)
        return head.matrix(name).product(head.norm("final_norm", hidden).bfloat16())

    def _add_routed(
        self, index: int, spec: MoeFfnSpec, hidden: Tensor, weights: DenseWeights
    ) -> None:
        layer = self._layout.layers[index]
        x, experts, shares = gate(spec, hidden, weights)
        if spec.shared_intermediate_size:
            add_gated_network(hidden, x, weights, "shared", SLICE_TOKENS)
        self.streamer.release()
        owned = expert_range(spec.num_experts, self._share.rank, self._share.world_size)
        routing = route(experts, shares, owned, [group.count for group in layer.groups])
        is_quantized = self._is_quantized(hidden)
        add_routed_experts(hidden, x, layer, routing, self.streamer, is_quantized=is_quantized)

    def _is_quantized(self, hidden: Tensor) -> bool:
        return hidden.shape[0] >= self._quantize_from

    def _positions_of(self, batch: Batch) -> Positions:
        if self._positions is None or self._positions.batch is not batch:
            self._positions = Positions(batch, self._tables, self.device)
        return self._positions
