"""The prefill engine: one thread that computes prompts, pass by pass over the weights.

Writes KV into the jobs' leased blocks layer by layer and leaves each last position's hidden state
in the lease's slot. It never samples, and it knows nothing of gRPC.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from headwater.calibration import PROMPT_SIZES, calibrate
from headwater.errors import (
    CancelledError,
    HeadwaterError,
    InternalError,
    ResourceError,
    SegmentError,
    UnavailableError,
)
from headwater.services.prefill.job import PrefillDone
from headwater.services.prefill.pack import Pack
from headwater.services.prefill.scheduler import PrefillScheduler
from headwater.services.prefill.ways import PassWays
from headwater.telemetry.rate import BusyRate, RateMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headwater.costs import PassCosts
    from headwater.model.interface import Model
    from headwater.services.prefill.job import PrefillJob
    from headwater.services.prefill.scheduler import Share

logger = logging.getLogger(__name__)


class PrefillEngine:
    """`submit` may be called from any thread; a job is cancelled by setting its event.

    `ways` says on how many GPUs a pass is computed, and what passes take. `streamed_bytes` tells
    how much GPUs were given so far; `streaming` holds that against the time of the passes. While
    `is_in_pass` the weights are gone through, for prompts or to measure.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int,
        max_waiting: int,
        ways: PassWays | None = None,
        streamed_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._max_waiting = max_waiting
        self._scheduler = PrefillScheduler(chunk_tokens)
        self.ways = ways or PassWays(chunk_tokens)
        self._inbox: queue.SimpleQueue[PrefillJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefill-engine", daemon=True)
        self._lock = threading.Lock()
        self._is_stopping = False
        self._to_calibrate: dict[int, Model] = {}
        self._streamed_bytes = streamed_bytes
        self.streaming = BusyRate()
        self.num_pending_tokens = 0
        self.num_passes = 0
        self.is_in_pass = False
        self.computed = RateMeter()

    @property
    def num_running(self) -> int:
        """Jobs begun and not done."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Jobs not begun."""
        return self._inbox.qsize() + len(self._scheduler.jobs) - self._scheduler.num_running

    @property
    def costs(self) -> PassCosts:
        """What passes take, as things are now."""
        return self.ways.costs

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def calibrate(self, models: Mapping[int, Model]) -> None:
        """Measures the model of each way, unless there is real work to measure it by."""
        self._to_calibrate = dict(models)
        self._inbox.put(None)

    def submit(self, job: PrefillJob) -> None:
        """Queues a job. Raises ResourceError when too many wait."""
        if self.num_waiting >= self._max_waiting:
            raise ResourceError(
                f"{self._max_waiting} prompts wait for prefill already; try again later or raise "
                "prefill.max_waiting"
            )
        job.submitted_at = time.monotonic()
        self._count_pending(job.num_pending)
        self._inbox.put(job)

    def stop(self) -> None:
        """Ends the thread after the layer it is in; jobs end with UnavailableError."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._is_stopping:
                try:
                    self._turn()
                except Exception as failure:
                    # A thread that is gone would leave a process that says SERVING and is not.
                    logger.exception("a turn of the prefill engine failed")
                    error = InternalError(f"prefill failed by a fault of ours: {failure!r}")
                    for job in list(self._scheduler.jobs):
                        self._end(job, error)
        while not self._inbox.empty():
            self._receive()
        for job in list(self._scheduler.jobs):
            self._end(job, UnavailableError("the prefill process is stopping; try again"))

    def _turn(self) -> None:
        """What came, who left, and a pass."""
        self._receive()
        for job in list(self._scheduler.jobs):
            self._end_if_over(job)
        if self._scheduler.jobs:
            self.ways.choose(sum(job.num_pending for job in self._scheduler.jobs))
            self._scheduler.pass_tokens = self.ways.pass_tokens
            with self._in_pass():
                self._pass(self._scheduler.plan())

    def _receive(self) -> None:
        """Takes new jobs; sleeps while there is nothing to do."""
        must_wait = not (self._scheduler.jobs or self._is_stopping)
        while must_wait or not self._inbox.empty():
            job = self._inbox.get()
            must_wait = False
            if job is not None:
                self._scheduler.add(job)
        if self._to_calibrate and not self._scheduler.jobs:
            models, self._to_calibrate = self._to_calibrate, {}
            with self._in_pass():
                for way, model in models.items():
                    observe = functools.partial(self.ways.observe_made_up, way)
                    calibrate(model, PROMPT_SIZES, observe, self._has_work)

    @contextlib.contextmanager
    def _in_pass(self) -> Iterator[None]:
        self.is_in_pass = True
        try:
            yield
        finally:
            self.is_in_pass = False

    def _has_work(self) -> bool:
        return self._is_stopping or not self._inbox.empty()

    def _pass(self, shares: list[Share]) -> None:
        """Computes `shares` through all layers; each job ends by itself, whatever others do."""
        shares = [share for share in shares if self._begin(share.job)]
        if not shares:
            return
        began_at = time.monotonic()
        try:
            pack = Pack(shares)
            for layer in range(pack.num_layers):
                for share in list(pack.shares):
                    if self._end_if_over(share.job):
                        pack.drop(share.job)
                if not pack.shares:
                    return
                pack.forward_layer(layer)
                for share in pack.shares:
                    share.job.emit(share.job.progress(share.num_tokens * (layer + 1)))
            seconds = time.monotonic() - began_at
            self._commit(pack, seconds)
        except HeadwaterError as error:
            self._end_all(shares, error)
            return
        except Exception as failure:
            logger.exception("a prefill pass of %d prompts failed", len(shares))
            self._end_all(shares, InternalError(f"prefill failed by a fault of ours: {failure!r}"))
            return
        if len(pack.shares) == len(shares):
            self.ways.observe(pack.num_tokens, seconds)

    def _commit(self, pack: Pack, seconds: float) -> None:
        """Notes what a pass of `seconds` computed, and ends the jobs that are done."""
        self.num_passes += 1
        self.ways.count()
        self.computed.add(pack.num_tokens)
        self.streaming.reached(self._streamed_bytes(), seconds)
        for share in pack.shares:
            job = share.job
            job.num_computed += share.num_tokens
            job.stages.note(
                "prefill.chunk",
                chunk_tokens=share.num_tokens,
                pass_tokens=pack.num_tokens,
                chunk_seconds=seconds,
            )
            self._count_pending(-share.num_tokens)
            if job.num_pending == 0:
                pack.leave_hidden(job)
                job.writer.complete(job.lease, job.token_ids)
                self._end(job, _done(job))

    def _begin(self, job: PrefillJob) -> bool:
        """Takes the slot's writer lock at the job's first pass; False when that ended the job."""
        if job.began_at is None:
            try:
                job.held.enter_context(job.writer.writing(job.lease))
            except HeadwaterError as error:
                self._end(job, error)
                return False
            job.began_at = time.monotonic()
            job.stages.note("started", queue_seconds=job.began_at - job.submitted_at)
        return True

    def _end_if_over(self, job: PrefillJob) -> bool:
        """Ends a job that need not go on; cheap enough to call between layers."""
        try:
            if job.cancelled.is_set():
                raise CancelledError(f"prefill of request {job.request_id} was cancelled")
            if self._is_stopping:
                raise UnavailableError("the prefill process is stopping; try again")
            job.writer.check(job.lease)
        except HeadwaterError as error:
            self._end(job, error)
            return True
        return False

    def _end_all(self, shares: list[Share], error: HeadwaterError) -> None:
        for share in shares:
            if share.job in self._scheduler.jobs:
                self._end(share.job, error)

    def _end(self, job: PrefillJob, last: PrefillDone | HeadwaterError) -> None:
        self._scheduler.finish(job)
        self._count_pending(-job.num_pending)
        # A pool that was detached meanwhile has let go of its locks already.
        with contextlib.suppress(SegmentError):
            job.held.close()
        job.emit(last)

    def _count_pending(self, num_tokens: int) -> None:
        with self._lock:
            self.num_pending_tokens += num_tokens


def _done(job: PrefillJob) -> PrefillDone:
    began_at = job.began_at or job.submitted_at
    return PrefillDone(
        computed_tokens=len(job.token_ids) - job.lease.cached_tokens,
        queue_seconds=began_at - job.submitted_at,
        compute_seconds=time.monotonic() - began_at,
    )
