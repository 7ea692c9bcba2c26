"""HybridModel: answers by GPU and CPU together, with the face of headwater.model.interface.Model.

Owns the choice, in every pass, of who computes which sequence: single tokens of sequences that fit
the device's cache go to the hybrid decoder, everything else to the CPU's kernels. When the device
fails, all goes to the CPU from then on; nothing is lost, as the pages hold every entry.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu.device_cache import DeviceCache
from headwater.gpu.dual_batch import DualBatchPolicy, micro_batches

if TYPE_CHECKING:
    from headwater.gpu.hybrid_decoder import HybridDecoder
    from headwater.kv.pages import KvPages
    from headwater.model.batch import Batch, SequenceSpan
    from headwater.model.interface import Model
    from headwater.model.spec import ModelSpec

logger = logging.getLogger(__name__)


class HybridModel:
    """`on_cpu` computes what the decoder does not. One thread at a time may call.

    Results of GPU and CPU differ in their last bits, so an answer may depend on who computed it.
    """

    def __init__(self, decoder: HybridDecoder, on_cpu: Model) -> None:
        self.spec: ModelSpec = on_cpu.spec
        self._on_cpu = on_cpu
        self._decoder: HybridDecoder | None = decoder
        self._worker = decoder.worker
        self._cache = DeviceCache(decoder.cache)
        self._policy = DualBatchPolicy() if decoder.num_lanes > 1 else None
        # States that the latest step gave, and their logits.
        self._latest: tuple[Tensor, Tensor] | None = None
        self.num_device_steps = 0
        self.num_dual_steps = 0

    @property
    def is_on_device(self) -> bool:
        """Whether the device is still in use."""
        return self._decoder is not None

    @property
    def pulled_bytes(self) -> int:
        """Bytes of keys and values copied to the device so far."""
        return self._cache.pulled_bytes

    @property
    def dual_speedup(self) -> float:
        """Greatest gain of two micro-batches that was measured, as a ratio; zero: none known."""
        return max(self._policy.speedups.values(), default=0.0) if self._policy else 0.0

    @property
    def fetched_bytes(self) -> int:
        """Bytes of experts that the CPU read ahead so far."""
        return self._worker.fetched_bytes if self._worker else 0

    @property
    def num_predicted(self) -> int:
        """Layers for which it did, by a prediction of the GPU's."""
        return self._worker.num_predicted if self._worker else 0

    @property
    def num_right(self) -> int:
        """Those of them whose likeliest expert was then asked for."""
        return self._worker.num_right if self._worker else 0

    def embed(self, token_ids: Tensor) -> Tensor:
        """See Model; on the CPU."""
        return self._on_cpu.embed(token_ids)

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """See Model; on the CPU."""
        for span in batch.spans:
            self._cache.written_elsewhere(span)
        return self._on_cpu.forward_layer(index, hidden, batch, pages)

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """See Model: hidden states [T, hidden] on the host; the pages hold all entries after."""
        ours = self._for_device(batch)
        if not ours:
            return self._compute_on_cpu(batch, pages)
        taken = {span.first_row for span in ours}
        others = [span for span in batch.spans if span.first_row not in taken]
        hidden = torch.empty(batch.token_ids.numel(), self.spec.hidden_size)
        if others:
            part = batch.restricted(others)
            hidden[part.rows] = self._compute_on_cpu(part.batch, pages)
        try:
            self._compute_on_device(ours, batch, pages, hidden)
        except RuntimeError as problem:
            # CUDA's errors, lack of memory among them; most leave the device unusable.
            self._decoder = None
            logger.error("answers are computed on the CPU from now on: %s", problem)
            part = batch.restricted(ours)
            hidden[part.rows] = self._compute_on_cpu(part.batch, pages)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model; both on the host, the result valid until the next call."""
        if self._decoder is None:
            return self._on_cpu.logits(hidden)
        if self._latest is not None and torch.equal(self._latest[0], hidden):
            return self._latest[1]
        # They lie where the next ones will.
        self._latest = None
        return self._decoder.logits(hidden)

    def _for_device(self, batch: Batch) -> list[SequenceSpan]:
        """The spans that the decoder computes; no more than it has rows."""
        decoder = self._decoder
        if decoder is None:
            return []
        fitting = [
            span
            for span in batch.spans
            if span.sequence_id is not None
            and span.num_new == 1
            and span.start < decoder.max_context
        ]
        # Those that are there already come first: others would have to be brought.
        fitting.sort(key=lambda s: self._cache.table.find(s.sequence_id or 0) is None)
        return fitting[: decoder.max_rows]

    def _compute_on_cpu(self, batch: Batch, pages: KvPages) -> Tensor:
        for span in batch.spans:
            self._cache.written_elsewhere(span)
        return self._on_cpu.forward(batch, pages)

    def _compute_on_device(
        self, spans: list[SequenceSpan], batch: Batch, pages: KvPages, hidden: Tensor
    ) -> None:
        decoder = self._decoder
        assert decoder is not None
        if decoder.device.type == "cuda":
            # Triton launches on the thread's own current device.
            torch.cuda.set_device(decoder.device)
        ordered = self._cache.arrange(spans, pages)
        rows = torch.tensor([span.first_row for span in ordered])
        positions = batch.positions[rows]
        bound = decoder.bound(int(positions.max()) + 1)
        is_dual = self._policy is not None and self._policy.is_dual(len(ordered), bound)
        parts = micro_batches(len(ordered), is_dual=is_dual)
        is_first = not decoder.has_run(parts, bound)
        began_at = time.monotonic()
        states, entries = decoder.step(parts, batch.token_ids[rows], positions)
        if self._policy is not None and not is_first:
            seconds = time.monotonic() - began_at
            self._policy.observe(len(ordered), bound, seconds, is_dual=is_dual)
        self._cache.export(ordered, entries, pages)
        logits = decoder.logits(states)
        found = states.cpu()
        hidden[rows] = found
        # In the batch's order they are what will be asked for.
        is_in_order = bool((rows[1:] > rows[:-1]).all())
        self._latest = (found, logits) if is_in_order else None
        self.num_device_steps += 1
        self.num_dual_steps += is_dual
