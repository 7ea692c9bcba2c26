"""The decode engine: one thread that turns leased KV into tokens, a step at a time.

Owns the batch; the model, the KV memory and the pool are its caller's. Knows nothing of gRPC.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from headwater.calibration import PROMPT_SIZES, STEP_SIZES, calibrate, calibrate_steps
from headwater.costs import CostMeter
from headwater.errors import InternalError, UnavailableError
from headwater.generation import FinishReason, TokenEvent
from headwater.model.batch import Batch, SequenceChunk
from headwater.services.decode.pace import Pace
from headwater.services.decode.sampler import sample
from headwater.services.decode.scheduler import Scheduler
from headwater.telemetry.rate import RateMeter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headwater.costs import PassCosts
    from headwater.errors import HeadwaterError
    from headwater.kv.memory import KvMemory
    from headwater.kv.pool import KvPool
    from headwater.model.interface import Model
    from headwater.services.decode.scheduler import Work
    from headwater.services.decode.sequence import Sequence
    from headwater.services.decode.step_model import StepModel
    from headwater.telemetry.rate import BusyRate

logger = logging.getLogger(__name__)

# How soon to look again for blocks that others give back, while nothing can run.
RETRY_SECONDS = 0.005


class DecodeEngine:
    """Runs sequences until they stop; `submit` may be called from any thread.

    Prompts are computed by `prompt_model`, which gives the bits that prefill would give, and
    answers by `model`, token by token or, after a preemption, many at once: within one model that
    makes no difference. So it does not matter who computed a prompt, or how often.
    """

    def __init__(
        self,
        model: Model,
        prompt_model: Model,
        memory: KvMemory,
        pool: KvPool,
        steps: StepModel,
        *,
        max_batch: int,
        extend_tokens: int,
    ) -> None:
        self._model = model
        self._prompt_model = prompt_model
        self._memory = memory
        self._pool = pool
        self._steps = steps
        self._max_batch = max_batch
        self._extend_meter = CostMeter(extend_tokens)
        self._scheduler = Scheduler(
            pool,
            Pace(steps, extend_tokens=extend_tokens),
            self._extend_meter,
            max_batch=max_batch,
        )
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)
        self._is_stopping = False
        self._must_calibrate = False
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

    @property
    def extend_costs(self) -> PassCosts:
        """What passes over prompt tokens take."""
        return self._extend_meter.costs

    @property
    def num_extending_tokens(self) -> int:
        """Prompt tokens to compute, of all sequences."""
        return self._scheduler.num_extending_tokens

    @property
    def step_seconds(self) -> float:
        """What a step takes now, with one sequence more; zero when nothing is known."""
        running = list(self._scheduler.running)
        pace = self._scheduler.pace
        return pace.step_seconds(running) if running else self._steps.seconds(1, 0)

    @property
    def reading(self) -> BusyRate:
        """What steps read of weights and KV, in bytes, against the time they took."""
        return self._steps.reading

    @property
    def batch_limit(self) -> int:
        """Sequences that may run at once, as things are."""
        return self._scheduler.pace.batch_limit(list(self._scheduler.running), self._max_batch)

    def start(self, *, calibrates: bool = False) -> None:
        """Starts the thread, which first measures the models while there is nothing to do."""
        self._must_calibrate = calibrates
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
            if self._must_calibrate:
                self._calibrate()
            is_blocked = False
            while not self._is_stopping:
                try:
                    is_blocked = not self._turn(is_blocked)
                except Exception as failure:
                    # A thread that is gone would leave a process that says SERVING and is not.
                    logger.exception("a turn of the decode engine failed")
                    self._fail_all(
                        InternalError(f"decode failed by a fault of ours: {failure!r}; see the log")
                    )
        self._fail_all(UnavailableError("the decode process is stopping; try again"))

    def _turn(self, is_blocked: bool) -> bool:
        """What came, who left, and a step; False when there was nothing that could run."""
        self._receive(is_blocked)
        self._drop_cancelled()
        work = self._scheduler.plan()
        if work:
            self._step(work)
        return bool(work)

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
        answers = [item for item in work if item.num_tokens and not item.is_prompt]
        num_tokens = sum(item.num_tokens for item in answers)
        context_tokens = sum(len(item.sequence.tokens) for item in answers)
        try:
            states = self._extend([item for item in work if item.num_tokens and item.is_prompt])
            began_at = time.monotonic()
            states |= self._forward(answers, self._model)
            ready = [item.sequence for item in work if item.gives_token]
            for item in work:
                item.sequence.computed(item.num_tokens, self._pool)
            logits = self._logits(ready, states)
        except Exception as failure:
            logger.exception("a decode step of %d requests failed", len(work))
            self._fail_all(InternalError(f"a decode step failed by a fault of ours: {failure!r}"))
            return
        for sequence, scores in zip(ready, logits, strict=True):
            self._choose(sequence, scores)
        if answers:
            self._steps.observe(num_tokens, context_tokens, time.monotonic() - began_at)

    def _extend(self, prompts: list[Work]) -> dict[int, torch.Tensor]:
        """A pass over tokens of prompts; see `_forward`."""
        began_at = time.monotonic()
        states = self._forward(prompts, self._prompt_model)
        if prompts:
            num_tokens = sum(item.num_tokens for item in prompts)
            self._extend_meter.observe(num_tokens, time.monotonic() - began_at)
        return states

    def _forward(self, work: list[Work], model: Model) -> dict[int, torch.Tensor]:
        """The hidden state [hidden] of each sequence's last token in `work`, by id()."""
        if not work:
            return {}
        chunks = []
        for item in work:
            start = item.sequence.num_computed
            token_ids = item.sequence.tokens[start : start + item.num_tokens]
            chunks.append(
                SequenceChunk(
                    token_ids, start, item.sequence.block_ids, item.sequence.lease.lease_id
                )
            )
        batch = Batch.build(chunks, self._memory.layout.block_tokens)
        rows = model.forward(batch, self._memory.pages)[batch.last_rows]
        return {id(item.sequence): row for item, row in zip(work, rows, strict=True)}

    def _logits(
        self, ready: list[Sequence], states: dict[int, torch.Tensor]
    ) -> Iterable[torch.Tensor]:
        """Scores [vocabulary] for each sequence's next token.

        A sequence's first one comes from what prefill left in its slot, if prefill computed it.
        """
        if not ready:
            return ()
        slots = self._memory.hidden
        hidden = [slots[s.lease.slot] if s.has_hidden else states[id(s)] for s in ready]
        return self._model.logits(torch.stack(hidden))

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

    def _calibrate(self) -> None:
        """Measures both models, until there is something to do."""

        def observe_step(num_tokens: int, seconds: float) -> None:
            self._steps.observe(num_tokens, 0, seconds)

        def has_work() -> bool:
            return not self._inbox.empty()

        calibrate_steps(self._model, STEP_SIZES, observe_step, has_work)
        calibrate(self._prompt_model, PROMPT_SIZES, self._extend_meter.observe, has_work)

    def _drop_cancelled(self) -> None:
        for sequence in self._scheduler.cancelled():
            self._end(sequence, TokenEvent((), FinishReason.CANCELLED))

    def _end(self, sequence: Sequence, last: TokenEvent | HeadwaterError) -> None:
        self._scheduler.finish(sequence)
        sequence.emit(last)

    def _fail_all(self, error: HeadwaterError) -> None:
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._end(sequence, error)
