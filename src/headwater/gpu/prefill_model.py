"""StreamedModel: prompts on a GPU that holds a small part of the weights.

Owns a sweep: layer after layer, weights arrive while earlier ones compute. It has the face of
headwater.model.interface.Model; hidden states stay on the device between layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.errors import ResourceError
from headwater.gpu.attention import Context, add_attention, normalised
from headwater.gpu.dense import DenseWeights, add_gated_network
from headwater.gpu.embedding import Embedding
from headwater.gpu.kv_export import KvExport
from headwater.gpu.layout import DENSE_RING, EXPERT_RING, ModelLayout, expert_range, view_parts
from headwater.gpu.memory_plan import SLICE_TOKENS, MemoryPlan
from headwater.gpu.portion import Portion, portion_of
from headwater.gpu.positions import Positions
from headwater.gpu.precision import rounded
from headwater.gpu.ring import Ring, ring_memory
from headwater.gpu.routed_experts import add_routed_experts
from headwater.gpu.routing import gate, route
from headwater.gpu.streamer import Streamer
from headwater.gpu.streams import Queues
from headwater.model.layer_spec import MoeFfnSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.gpu.exchange import Exchange
    from headwater.gpu.layout import LayerLayout
    from headwater.gpu.streamer import HostRanges
    from headwater.kv.pages import KvPages
    from headwater.model.batch import Batch
    from headwater.model.layer_spec import RopeSpec
    from headwater.model.rope import RotaryTable
    from headwater.model.source import Weights
    from headwater.model.spec import ModelSpec


class StreamedModel:
    """A decoder-only model over `weights` on the host; `layout` and `plan` say what goes where.

    Activations are FP16; sweeps of `quantize_from` tokens or more round those that meet FP8 experts
    to E4M3, for cards that multiply it much faster than FP16; with 0 none does.

    With an `exchange` it is one of several ranks that compute every prompt together, each a stripe
    of its tokens and a run of every layer's experts, which `layout` must have been made for. All
    ranks are called alike; after the last layer hidden states are whole, until then each rank has
    those of its own rows.

    `memory` is that of both rings, where several models use it in turn: see Streamer.forget.

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
        exchange: Exchange | None = None,
        memory: Sequence[Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.device = queues.device
        self.max_tokens = plan.max_tokens
        self._weights = weights
        self._layout = layout
        self._quantize_from = quantize_from
        self._is_fp8 = spec.quant.kind == "fp8"
        self._exchange = exchange
        self._embedding = Embedding(weights.tensor("embed"), self.device)
        sizes = [layout.ring_sizes(ring) for ring in (DENSE_RING, EXPERT_RING)]
        if memory is None:
            memory = [
                ring_memory(min(num_items, slots), slot_bytes, self.device)
                for (num_items, slot_bytes), slots in zip(
                    sizes, (plan.dense_slots, plan.expert_slots), strict=True
                )
            ]
        rings = [Ring(*size, room) for size, room in zip(sizes, memory, strict=True)]
        self.streamer = Streamer(layout.items, rings, queues, ranges)
        self._export = KvExport(self.device)
        self._tables: dict[RopeSpec, RotaryTable] = {}
        self._portion: Portion | None = None
        self._positions: Positions | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] on the host -> FP32 [T, hidden] on the device; begins a sweep.

        With several ranks the ids themselves, [T, 1]: each rank looks up those of its own rows.
        """
        self.streamer.reset()
        if self.device.type == "cuda":
            # Triton launches on the thread's own current device.
            torch.cuda.set_device(self.device)
        return token_ids[:, None] if self._exchange is not None else self._embedding.rows(token_ids)

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """One layer, in place: FP32 [T, hidden] on the device. The layer's KV is in `pages` after.

        Before the last layer the device may still compute when this returns.

        Raises ResourceError when the device's memory does not do, which harms this sweep alone,
        and UnavailableError when another rank is gone.
        """
        try:
            return self._compute_layer(index, hidden, batch, pages)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{self.device}: out of memory in a sweep of {len(batch.token_ids)} tokens; lower "
                "gpu.sweep_tokens or gpu.vram_gib, or free the device's memory"
            ) from error

    def _compute_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        spec, layer = self.spec.layers[index], self._layout.layers[index]
        portion, positions = self._portion_of(batch)
        exchange = self._exchange
        if exchange is not None and index == 0:
            hidden = self._embedding.rows(hidden[portion.rows_by_rank[exchange.rank], 0])
        is_quantized = self._is_fp8 and 0 < self._quantize_from <= len(batch.token_ids)
        parts = self.streamer.take(layer.dense_key)
        weights = DenseWeights(view_parts(parts, layer.dense_views), self.spec.norm_eps)
        context = Context(index, portion, positions, pages, self._export, self._gathered)
        add_attention(spec.attention, hidden, weights, context)
        if isinstance(spec.ffn, MoeFfnSpec):
            self._add_routed(layer, spec.ffn, hidden, weights, is_quantized=is_quantized)
        else:
            x = normalised(hidden, weights, "ffn_norm")
            add_gated_network(hidden, x, weights, "ffn", SLICE_TOKENS)
            self.streamer.release()
        self._export.finish(index, portion, pages)
        if index == self.spec.num_layers - 1:
            hidden = self._gathered(hidden)
            self.streamer.queues.mark_computed().synchronize()
        return hidden

    def keep(self, hidden: Tensor, spans: Sequence[int]) -> Tensor:
        """Hidden states between layers of what is left of the batch: the spans of these numbers.

        To be called where rows are striped, before the next layer is computed for the new batch.
        """
        assert self._portion is not None
        return hidden[self._portion.rows_of(spans).to(self.device)]

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
        head = DenseWeights(tensors, self.spec.norm_eps)
        hidden = hidden.to(self.device)
        return head.matrix(name).product(rounded(head.norm("final_norm", hidden)))

    def _add_routed(
        self,
        layer: LayerLayout,
        spec: MoeFfnSpec,
        hidden: Tensor,
        weights: DenseWeights,
        *,
        is_quantized: bool,
    ) -> None:
        x, experts, shares = gate(spec, hidden, weights)
        exchange, target, gatherings = self._exchange, hidden, []
        if exchange is not None:
            assert self._portion is not None
            # Unsorted, and with the gate's choice, which is small beside them; on its way while
            # the shared experts compute.
            choice = torch.cat((experts.int(), shares.view(torch.int32)), dim=1)
            gatherings = [exchange.begin_gather(part, self._portion) for part in (choice, x)]
        if spec.shared_intermediate_size:
            add_gated_network(hidden, x, weights, "shared", SLICE_TOKENS)
        self.streamer.release()
        if exchange is not None:
            choice, x = (gathering.finish() for gathering in gatherings)
            experts, shares = choice.chunk(2, dim=1)
            experts, shares = experts.long(), shares.contiguous().view(torch.float32)
            target = torch.zeros(x.shape, device=self.device)
        rank, world_size = (0, 1) if exchange is None else (exchange.rank, exchange.world_size)
        owned = expert_range(spec.num_experts, rank, world_size)
        sizes = [group.count for group in layer.groups]
        routing = route(experts, shares, owned, sizes, is_quantized=is_quantized)
        add_routed_experts(target, x, layer, routing, self.streamer, is_quantized=is_quantized)
        if exchange is not None:
            assert self._portion is not None
            hidden += exchange.reduce(target, self._portion)

    def _gathered(self, mine: Tensor) -> Tensor:
        """Rows of all ranks, in the batch's order, of this rank's."""
        if self._exchange is None:
            return mine
        assert self._portion is not None
        return self._exchange.gather(mine, self._portion)

    def _portion_of(self, batch: Batch) -> tuple[Portion, Positions]:
        """This rank's rows of the batch, and where they stand; made at its first layer."""
        if self._portion is None or self._positions is None or self._portion.batch is not batch:
            exchange = self._exchange
            ranks = () if exchange is None else (exchange.rank, exchange.world_size)
            self._portion = portion_of(batch, *ranks)
            self._positions = Positions(self._portion.positions, self._tables, self.device)
        return self._portion, self._positions
