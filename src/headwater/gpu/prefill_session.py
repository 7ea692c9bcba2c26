"""Everything that stream-loading prefill needs on a device, made in one go and let go in one.

Owns the registration of the weights with CUDA and the life of the models.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from headwater.errors import ResourceError
from headwater.gpu.host_ranges import RegisteredRanges
from headwater.gpu.kernels.warm_up import warm_up
from headwater.gpu.layout import DENSE_RING, EXPERT_RING, lay_out
from headwater.gpu.memory_plan import RESERVE_BYTES, plan_memory
from headwater.gpu.pacing import rest
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.ring import ring_memory
from headwater.gpu.streams import queues_on
from headwater.model.layer_spec import MoeFfnSpec

if TYPE_CHECKING:
    from headwater.gpu.device import Gpu
    from headwater.gpu.exchange import Exchange
    from headwater.model.source import Weights
    from headwater.model.spec import ModelSpec

logger = logging.getLogger(__name__)

_GIB = 2**30


class PrefillSession:
    """A StreamedModel on `gpu` over weights in a mapped segment, which it keeps registered.

    Raises ResourceError when the device's memory does not do. Rings are allocated here, never
    later; host memory is registered in the background, in the order of use. With an `exchange` it
    is one of several ranks: see StreamedModel. The first of them also has `alone`, which computes
    without the others in the same memory; `switch_to` says which of them comes next.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        gpu: Gpu,
        *,
        wanted_tokens: int,
        quantize_from: int = 0,
        exchange: Exchange | None = None,
    ) -> None:
        rank, world_size = (0, 1) if exchange is None else (exchange.rank, exchange.world_size)
        self.layout = layout = lay_out(spec, weights, rank=rank, world_size=world_size)
        has_alone = world_size > 1 and rank == 0
        whole = lay_out(spec, weights) if has_alone else None
        self.plan = plan_memory(
            spec,
            layout,
            gpu.available_bytes,
            wanted_tokens,
            world_size=world_size,
            others=() if whole is None else (whole,),
        )
        is_cuda = gpu.device.type == "cuda"
        if not gpu.has_fp8:
            quantize_from = 0
        if is_cuda:
            torch.cuda.set_device(gpu.device)
        # A CPU copies from memory as it is.
        self.ranges = RegisteredRanges(
            layout.ranges if is_cuda else (), cudart=None if is_cuda else self
        )
        queues = queues_on(gpu.device)
        layouts = [layout] if whole is None else [layout, whole]
        memory = [
            ring_memory(slots, max(each.ring_sizes(ring)[1] for each in layouts), gpu.device)
            for ring, slots in (
                (DENSE_RING, self.plan.dense_slots),
                (EXPERT_RING, self.plan.expert_slots),
            )
        ]
        models = [
            StreamedModel(
                spec,
                weights,
                each,
                self.plan,
                queues,
                ranges=self.ranges if is_cuda else None,
                quantize_from=quantize_from,
                exchange=exchange if each is layout else None,
                memory=memory,
            )
            for each in layouts
        ]
        self.model = self._latest = models[0]
        self.alone = models[-1] if has_alone else None
        if is_cuda:
            choices = {
                la.ffn.experts_per_token for la in spec.layers if isinstance(la.ffn, MoeFfnSpec)
            }
            for count in choices:
                groups = [group for layer in layout.layers for group in layer.groups]
                warm_up(groups, spec.hidden_size, count, gpu.device, is_quantized=quantize_from > 0)
            rest(0.0)
            _reserve(self.plan.activation_bytes - RESERVE_BYTES, gpu.device)
            self.ranges.start()
        logger.info(
            "prefill streams %.1f GiB a sweep through %s: rings of %d and %d slots, %.1f GiB, "
            "up to %d tokens a sweep",
            sum(item.num_bytes for item in layout.items) / _GIB,
            gpu.name,
            self.plan.dense_slots,
            self.plan.expert_slots,
            self.plan.ring_bytes / _GIB,
            self.plan.max_tokens,
        )

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the device so far."""
        alone = 0 if self.alone is None else self.alone.streamer.copied_bytes
        return self.model.streamer.copied_bytes + alone

    def switch_to(self, model: StreamedModel) -> None:
        """The next sweep is `model`'s; the other one's copies ahead are dropped."""
        if model is not self._latest:
            self._latest.streamer.forget()
            model.streamer.forget()
            self._latest = model

    def close(self) -> None:
        """Ends all copies and lets host memory go."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
            self.ranges.close()


def _reserve(num_bytes: int, device: torch.device) -> None:
    """Takes memory from the driver now, for torch's allocator to cut up later.

    Taking it piece by piece during the first sweeps cost 4 s of each on an H200 in a virtual
    machine; and memory that is not there is missed at the start, not in the middle of a prompt.
    """
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{device}: no room for {num_bytes / _GIB:.1f} GiB of activations; lower gpu.vram_gib "
            "or gpu.sweep_tokens, or free the device's memory"
        ) from error
