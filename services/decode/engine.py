"""The decode engine: one thread that turns leased KV into tokens, a step at a time.

Owns the batch; the model, the KV memory and the leases are its caller's. Knows nothing of gRPC.
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
    from headwater.errors import HeadwaterError
    from headwater.kv.memory import KvMemory
    from headwater.model.transformer import Transformer
    from headwater.services.decode.sequence import Sequence

logger = logging.getLogger(__name__)


class DecodeEngine:
    """Runs sequences until they stop; `submit` and `cancel` may be called from any thread."""

    def __init__(self, model: Transformer, memory: KvMemory, *, max_batch: int) -> None:
        self._model = model
        self._memory = memory
        self._scheduler = Scheduler(max_batch)
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
        """Sequences waiting for a place in the batch."""
        return len(self._scheduler.waiting) + self._inbox.qsize()

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
            while not self._is_stopping:
                self._receive()
                self._drop_cancelled()
                batch = self._scheduler.next_batch()
                if batch:
                    self._step(batch)
        self._fail_all(UnavailableError("the decode process is stopping; try again"))

    def _receive(self) -> None:
        """Takes new sequences; sleeps while there is nothing to do."""
        is_idle = not (self._scheduler.running or self._scheduler.waiting)
        while is_idle or not self._inbox.empty():
            sequence = self._inbox.get()
            if sequence is None:
                return
            self._scheduler.add(sequence)
            is_idle = False

    def _step(self, batch: list[Sequence]) -> None:
        try:
            logits = self._model.logits(self._last_hidden(batch))
        except Exception as failure:
            logger.exception("a decode step of %d requests failed", len(batch))
            self._fail_all(InternalError(f"a decode step failed by a fault of ours: {failure!r}"))
            return
        for sequence, scores in zip(batch, logits, strict=True):
            self._advance(sequence, scores)

    def _advance(self, sequence: Sequence, scores: torch.Tensor) -> None:
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

    def _last_hidden(self, batch: list[Sequence]) -> torch.Tensor:
        """Hidden states [len(batch), hidden] that give each sequence's next token.

        A sequence's first one was left in its slot by prefill; later ones come from its last token.
        """
        hidden = torch.empty(len(batch), self._memory.layout.hidden_size)
        growing = [(i, s, s.last_token) for i, s in enumerate(batch) if s.last_token is not None]
        for i, sequence in enumerate(batch):
            if sequence.last_token is None:
                hidden[i] = self._memory.hidden[sequence.lease.slot]
        if growing:
            chunks = [
                SequenceChunk((token,), s.position, s.lease.block_ids) for _, s, token in growing
            ]
            step = Batch.build(chunks, self._memory.layout.block_tokens)
            state = self._model.embed(step.token_ids)
            for layer in range(self._memory.layout.num_layers):
                state = self._model.forward_layer(layer, state, step, self._memory.pages)
            hidden[[i for i, _, _ in growing]] = state
        return hidden

    def _drop_cancelled(self) -> None:
        for sequence in self._scheduler.cancelled():
            self._end(sequence, TokenEvent((), FinishReason.CANCELLED))

    def _end(self, sequence: Sequence, last: TokenEvent | HeadwaterError) -> None:
        self._scheduler.finish(sequence)
        sequence.emit(last)

    def _fail_all(self, error: HeadwaterError) -> None:
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._end(sequence, error)
