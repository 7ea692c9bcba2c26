"""The decode engine: one thread that turns leased KV into tokens, a step at a time.

Owns the batch; the model, the KV memory and the pool are its caller's. Knows nothing of gRPC.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

import torch

from headwater.errors import InternalError, UnavailableError
from headwater.generation import FinishReason, TokenEvent
from headwater.model.batch import Batch, SequenceChunk
from headwater.services.decode.sampler import sample
from headwater.services.decode.scheduler import Scheduler
from headwater.telemetry.rate import RateMeter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headwater.errors import HeadwaterError
    from headwater.kv.memory import KvMemory
    from headwater.kv.pool import KvPool
    from headwater.model.interface import Model
    from headwater.services.decode.scheduler import Work
    from headwater.services.decode.sequence import Sequence

logger = logging.getLogger(__name__)

# How soon to look again for blocks that others give back, while nothing can run.
RETRY_SECONDS = 0.005


class DecodeEngine:
    """Runs sequences until they stop; `submit` may be called from any thread."""

    def __init__(
        self,
        model: Model,
        memory: KvMemory,
        pool: KvPool,
        *,
        max_batch: int,
        extend_tokens: int,
    ) -> None:
        self._model = model
        self._memory = memory
        self._pool = pool
        self._scheduler = Scheduler(pool, max_batch=max_batch, extend_tokens=extend_tokens)
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)
        self._is_stopping = False
        self.generated = RateMeter()

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for a place in the batch, or for blocks."""
        return len(self._scheduler.waiting) + self._inbox.qsize()

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks back, since the start."""
        return self._scheduler.num_preemptions

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Starts generating; events arrive at `sequence.emit` from the engine's thread."""
        self._inbox.put(sequence)

    def stop(self) -> None:
        """Ends the thread after the step it is in; sequences end with UnavailableError."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            is_blocked = False
            while not self._is_stopping:
                self._receive(is_blocked)
                self._drop_cancelled()
                work = self._scheduler.plan()
                if work:
                    self._step(work)
                is_blocked = not work
        self._fail_all(UnavailableError("the decode process is stopping; try again"))

    def _receive(self, is_blocked: bool) -> None:
        """Takes new sequences; sleeps while there is nothing to do."""
        is_idle = not (self._scheduler.running or self._scheduler.waiting)
        timeout = RETRY_SECONDS if is_blocked and not is_idle else None
        must_wait = is_idle or is_blocked
        while must_wait or not self._inbox.empty():
            try:
                sequence = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return
            if sequence is None:
                return
            sequence.computed(0, self._pool)
            self._scheduler.add(sequence)
            must_wait = False

    def _step(self, work: list[Work]) -> None:
        try:
            ready, hidden = self._advance(work)
            logits: Iterable[torch.Tensor] = self._model.logits(hidden) if ready else ()
        except Exception as failure:
            logger.exception("a decode step of %d requests failed", len(work))
            self._fail_all(InternalError(f"a decode step failed by a fault of ours: {failure!r}"))
            return
        for sequence, scores in zip(ready, logits, strict=True):
            self._choose(sequence, scores)

    def _advance(self, work: list[Work]) -> tuple[list[Sequence], torch.Tensor]:
        """Computes the step's tokens.

        Returns the sequences that get a next token, and the hidden states [n, hidden] that give it.
        A sequence's first one was left in its slot by prefill; the others come from its last token.
        """
        ready = [item.sequence for item in work if item.gives_token]
        hidden = torch.empty(len(ready), self._memory.layout.hidden_size)
        rows = {id(sequence): row for row, sequence in enumerate(ready)}
        for sequence in ready:
            if sequence.has_hidden:
                hidden[rows[id(sequence)]] = self._memory.hidden[sequence.lease.slot]
        computing = [item for item in work if item.num_tokens]
        if computing:
            batch = self._batch(computing)
            state = self._model.forward(batch, self._memory.pages)
            for item, last_row in zip(computing, batch.last_rows.tolist(), strict=True):
                if item.gives_token:
                    hidden[rows[id(item.sequence)]] = state[last_row]
            for item in computing:
                item.sequence.computed(item.num_tokens, self._pool)
        return ready, hidden

    def _batch(self, work: list[Work]) -> Batch:
        chunks = []
        for item in work:
            start = item.sequence.num_computed
            token_ids = item.sequence.tokens[start : start + item.num_tokens]
            chunks.append(SequenceChunk(token_ids, start, item.sequence.block_ids))
        return Batch.build(chunks, self._memory.layout.block_tokens)

    def _choose(self, sequence: Sequence, scores: torch.Tensor) -> None:
        try:
            event = sequence.take(sample(scores, sequence.sampler))
        except Exception as failure:
            logger.exception("sampling of request %s failed", sequence.request_id)
            self._end(sequence, InternalError(f"sampling failed by a fault of ours: {failure!r}"))
            return
        self.generated.add(1)
        if event.finish_reason is None:
            sequence.emit(event)
        else:
            self._end(sequence, event)

    def _drop_cancelled(self) -> None:
        for sequence in self._scheduler.cancelled():
            self._end(sequence, TokenEvent((), FinishReason.CANCELLED))

    def _end(self, sequence: Sequence, last: TokenEvent | HeadwaterError) -> None:
        self._scheduler.finish(sequence)
        sequence.emit(last)

    def _fail_all(self, error: HeadwaterError) -> None:
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._end(sequence, error)
