"""The prefill engine: one thread that computes prompts, first come first served.

Writes KV into the job's leased blocks layer by layer and leaves the last position's hidden state
in the lease's slot. It never samples, and it knows nothing of gRPC.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from headwater.errors import (
    CancelledError,
    HeadwaterError,
    InternalError,
    ResourceError,
    UnavailableError,
)
from headwater.model.batch import Batch, SequenceChunk
from headwater.services.prefill.job import PrefillDone, PrefillProgress
from headwater.telemetry.rate import RateMeter

if TYPE_CHECKING:
    from headwater.services.prefill.job import PrefillJob

logger = logging.getLogger(__name__)


class PrefillEngine:
    """`submit` may be called from any thread; a job is cancelled by setting its event."""

    def __init__(self, *, chunk_tokens: int, max_waiting: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._inbox: queue.SimpleQueue[PrefillJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefill-engine", daemon=True)
        self._is_stopping = False
        self.num_running = 0
        self.computed = RateMeter()

    @property
    def num_waiting(self) -> int:
        """Jobs not begun."""
        return self._inbox.qsize()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, job: PrefillJob) -> None:
        """Queues a job. Raises ResourceError when too many wait."""
        if self._inbox.qsize() >= self._max_waiting:
            raise ResourceError(
                f"{self._max_waiting} prompts wait for prefill already; try again later or raise "
                "prefill.max_waiting"
            )
        job.submitted_at = time.monotonic()
        self._inbox.put(job)

    def stop(self) -> None:
        """Ends the thread after the layer it is in; jobs end with UnavailableError."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._inbox.get()) is not None:
                self.num_running = 1
                job.emit(self._outcome(job))
                self.num_running = 0

    def _outcome(self, job: PrefillJob) -> PrefillDone | HeadwaterError:
        try:
            return self._compute(job)
        except HeadwaterError as error:
            return error
        except Exception as failure:
            logger.exception("prefill of request %s failed", job.request_id)
            return InternalError(f"prefill failed by a fault of ours: {failure!r}")

    def _compute(self, job: PrefillJob) -> PrefillDone:
        began_at = time.monotonic()
        first = job.lease.cached_tokens
        with job.writer.writing(job.lease):
            for start in range(first, len(job.token_ids), self._chunk_tokens):
                hidden = self._compute_chunk(job, start)
            job.writer.memory.hidden[job.lease.slot] = hidden[-1]
            job.writer.complete(job.lease)
        num_computed = len(job.token_ids) - first
        self.computed.add(num_computed)
        return PrefillDone(
            computed_tokens=num_computed,
            queue_seconds=began_at - job.submitted_at,
            compute_seconds=time.monotonic() - began_at,
        )

    def _compute_chunk(self, job: PrefillJob, start: int) -> torch.Tensor:
        """All layers for tokens [start, start + chunk_tokens); returns hidden [tokens, hidden]."""
        layout = job.lease.layout
        token_ids = job.token_ids[start : start + self._chunk_tokens]
        batch = Batch.build(
            [SequenceChunk(token_ids, start, job.lease.block_ids)], layout.block_tokens
        )
        total = (len(job.token_ids) - job.lease.cached_tokens) * layout.num_layers
        before = (start - job.lease.cached_tokens) * layout.num_layers
        hidden = job.model.embed(batch.token_ids)
        for layer in range(layout.num_layers):
            self._check_going_on(job)
            hidden = job.model.forward_layer(layer, hidden, batch, job.writer.memory.pages)
            job.emit(PrefillProgress(before + len(token_ids) * (layer + 1), total))
        return hidden

    def _check_going_on(self, job: PrefillJob) -> None:
        if job.cancelled.is_set():
            raise CancelledError(f"prefill of request {job.request_id} was cancelled")
        if self._is_stopping:
            raise UnavailableError("the prefill process is stopping; try again")
        job.writer.check(job.lease)
