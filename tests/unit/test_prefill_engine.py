"""The prefill engine on the native kernels: packing, cancelling and dead leases change no bit."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest
import torch

from headwater.errors import (
    CancelledError,
    HeadwaterError,
    InternalError,
    LeaseError,
    ResourceError,
    UnavailableError,
)
from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import LAYOUT_VERSION, KvLayout
from headwater.kv.pool import KvPool
from headwater.kv.writer import KvWriter
from headwater.model.spec import ModelSpec
from headwater.services.prefill.engine import PrefillEngine
from headwater.services.prefill.job import PrefillDone, PrefillJob, PrefillProgress
from headwater.shm import Lifetime, Segment, SegmentKind
from headwater.weights.loader import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headwater.kv.lease import KvLease
    from headwater.kv.pages import KvPages
    from headwater.model.batch import Batch
    from headwater.model.interface import Model

BLOCK = 4
SECONDS = 60
PROMPTS = [[(7 * i + j) % 256 for j in range(n)] for i, n in enumerate((90, 5, 33, 1, 61, 12))]


class GatedModel:
    """The tiny model on the native kernels; each layer of each pass takes a permit."""

    def __init__(self, model: NativeTransformer) -> None:
        self.model = model
        self.spec = model.spec
        self._permits = threading.Semaphore(10**6)
        self.reached: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.failure: Exception | None = None

    def hold(self) -> None:
        """Nothing more is computed without `allow`; to be called while the engine is idle."""
        while not self.reached.empty():
            self.reached.get()
        self._permits = threading.Semaphore(0)

    def allow(self, num_layers: int = 10**6) -> None:
        """Lets so many layers pass."""
        self._permits.release(num_layers)

    def wait_for(self, layer: int, num_prompts: int) -> None:
        """Returns when a pass of so many prompts stands before that layer."""
        while self.reached.get(timeout=SECONDS) != (layer, num_prompts):
            pass

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(token_ids)

    def forward_layer(
        self, index: int, hidden: torch.Tensor, batch: Batch, pages: KvPages
    ) -> torch.Tensor:
        permits = self._permits
        self.reached.put((index, len(batch.spans)))
        assert permits.acquire(timeout=SECONDS)
        if self.failure is not None:
            raise self.failure
        return self.model.forward_layer(index, hidden, batch, pages)


@dataclass
class Request:
    """A submitted prompt."""

    job: PrefillJob
    lease: KvLease
    events: queue.SimpleQueue[PrefillProgress | PrefillDone | HeadwaterError]

    def end(self) -> PrefillDone | HeadwaterError:
        """Waits for the last event; progress only ever grows, up to all of it."""
        last = PrefillProgress(0, 1)
        while isinstance(event := self.events.get(timeout=SECONDS), PrefillProgress):
            assert event.done > last.done
            last = event
        if isinstance(event, PrefillDone):
            assert last.done == last.total
        return event


class Rig:
    """An engine, a pool with a slot per request, and the model."""

    def __init__(self, model_dir: Path, shm_prefix: str) -> None:
        spec = ModelSpec.load(model_dir)
        self.store = load_weights(model_dir, spec.tensors(), shm_prefix=shm_prefix)
        native = NativeTransformer(spec, self.store, WorkerPool(2), mode=Mode.PREFILL)
        self.model = GatedModel(native)
        self.layout = KvLayout.of(spec, num_blocks=256, block_tokens=BLOCK, num_slots=16)
        self.segment = Segment.create(
            f"{shm_prefix}.kv",
            self.layout.payload_bytes,
            kind=SegmentKind.KV,
            lifetime=Lifetime.BOUND,
            epoch=1,
            layout_version=LAYOUT_VERSION,
        )
        self.segment.mark_ready()
        self.pool = KvPool(self.segment, self.layout, ttl_ms=10**6)
        self.writer = KvWriter(self.segment.handle, self.layout)
        self.engine = PrefillEngine(chunk_tokens=32, max_waiting=16)

    def ask(self, prompt: list[int], priority: int = 0) -> Request:
        """Submits a prompt under a lease of its own."""
        lease = self.pool.reserve("r", len(prompt), 1)
        events: queue.SimpleQueue[PrefillProgress | PrefillDone | HeadwaterError] = (
            queue.SimpleQueue()
        )
        model: Model = self.model  # type: ignore[assignment]
        job = PrefillJob(
            "r", tuple(prompt), lease, model, self.writer, events.put, priority=priority
        )
        self.engine.submit(job)
        return Request(job, lease, events)

    def bits(self, request: Request) -> list[torch.Tensor]:
        """KV of every layer and token, and the hidden state, as prefill left them."""
        memory, blocks = self.writer.memory, list(request.lease.block_ids)
        num_tokens = len(request.job.token_ids)
        pages = [layer[blocks] for layer in memory.pages.layers]
        # [blocks, 2, block_tokens, heads, dim] -> [2, tokens, heads, dim]
        flat = [page.transpose(0, 1).flatten(1, 2)[:, :num_tokens].clone() for page in pages]
        return [*flat, memory.hidden[request.lease.slot].clone()]

    def close(self) -> None:
        self.model.allow()
        self.engine.stop()
        self.writer.close()
        self.segment.close()
        self.store.segment.unlink()
        self.store.close()


@pytest.fixture
def rig(tiny_model: Path, shm_prefix: str) -> Iterator[Rig]:
    rig = Rig(tiny_model, shm_prefix)
    yield rig
    rig.close()


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _alone(rig: Rig, prompt: list[int]) -> list[torch.Tensor]:
    """What prefill leaves of a prompt that has the engine for itself."""
    request = rig.ask(prompt)
    done = request.end()
    assert isinstance(done, PrefillDone)
    assert done.computed_tokens == len(prompt)
    bits = rig.bits(request)
    rig.pool.release(1, [request.lease.lease_id])
    return bits


def test_what_is_packed_together_changes_no_bit(rig: Rig) -> None:
    rig.engine.start()
    alone = [_alone(rig, prompt) for prompt in PROMPTS]
    rig.model.hold()
    requests = [rig.ask(prompt) for prompt in PROMPTS]
    rig.model.allow()
    for request, bits in zip(requests, alone, strict=True):
        assert isinstance(request.end(), PrefillDone)
        assert _same(rig.bits(request), bits)
    widest = max(rig.model.reached.get()[1] for _ in range(rig.model.reached.qsize()))
    assert widest >= 3, "several prompts shared a pass"
    assert rig.engine.num_pending_tokens == 0
    assert (rig.engine.num_running, rig.engine.num_waiting) == (0, 0)
    assert rig.engine.costs.measured_passes == rig.engine.num_passes


def test_short_prompts_do_not_wait_for_a_long_one(rig: Rig) -> None:
    rig.engine.start()
    rig.model.hold()
    long = rig.ask(PROMPTS[0] * 5)
    rig.model.wait_for(0, 1)
    short = [rig.ask(PROMPTS[1]), rig.ask(PROMPTS[3])]
    # The rest of the long one's first pass, and one that all three share.
    rig.model.allow(2 * rig.layout.num_layers)
    for request in short:
        assert isinstance(request.end(), PrefillDone)
    assert long.job.num_pending > 0
    rig.model.allow()
    assert isinstance(long.end(), PrefillDone)


def test_priority_goes_first(rig: Rig) -> None:
    rig.engine.start()
    rig.model.hold()
    rig.ask(PROMPTS[3])
    rig.model.wait_for(0, 1)
    usual, urgent = rig.ask(PROMPTS[0]), rig.ask(PROMPTS[4], priority=1)
    # 61 urgent tokens are 2 passes of 32, in which the usual one gets what is left.
    rig.model.allow((1 + 2) * rig.layout.num_layers)
    assert isinstance(urgent.end(), PrefillDone)
    assert usual.job.num_pending == len(PROMPTS[0]) - 3
    rig.model.allow()
    assert isinstance(usual.end(), PrefillDone)


@pytest.mark.parametrize("how", ["cancelled", "lease released"])
@pytest.mark.parametrize("layers", [0, 1])
def test_one_that_ends_early_harms_nobody_else(rig: Rig, how: str, layers: int) -> None:
    """It leaves the pack between two layers; nothing is written to its blocks afterwards."""
    rig.engine.start()
    alone = [_alone(rig, PROMPTS[i]) for i in (3, 1)]
    rig.model.hold()
    blocker = rig.ask([3])
    rig.model.wait_for(0, 1)
    others = [rig.ask(PROMPTS[3]), rig.ask(PROMPTS[1])]
    victim = rig.ask(PROMPTS[5])
    blocks = list(victim.lease.block_ids)
    if layers:
        rig.model.allow(rig.layout.num_layers)
        rig.model.wait_for(0, 3)
    later = [layer[blocks].clone() for layer in rig.writer.memory.pages.layers[layers:]]
    if how == "cancelled":
        victim.job.cancelled.set()
    else:
        rig.pool.release(1, [victim.lease.lease_id])
    rig.model.allow()
    assert isinstance(victim.end(), CancelledError if how == "cancelled" else LeaseError)
    for request in (blocker, *others):
        assert isinstance(request.end(), PrefillDone)
    for request, bits in zip(others, alone, strict=True):
        assert _same(rig.bits(request), bits)
    assert _same([layer[blocks] for layer in rig.writer.memory.pages.layers[layers:]], later)
    rig.pool.sweep()
    assert rig.pool.num_quarantined_blocks == 0
    assert rig.engine.num_pending_tokens == 0


def test_a_failure_ends_the_pass_and_not_the_engine(rig: Rig) -> None:
    rig.engine.start()
    rig.model.failure = RuntimeError("out of paper")
    error = rig.ask(PROMPTS[1]).end()
    assert isinstance(error, InternalError)
    assert "out of paper" in str(error)
    rig.model.failure = ResourceError("the device has no room")
    assert isinstance(rig.ask(PROMPTS[1]).end(), ResourceError)
    rig.model.failure = None
    assert isinstance(rig.ask(PROMPTS[1]).end(), PrefillDone)


def test_a_fault_of_ours_ends_the_prompts_and_not_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine.start()
    with monkeypatch.context() as patched:
        patched.setattr(rig.writer, "check", lambda _: 1 / 0)
        error = rig.ask(PROMPTS[1]).end()
    assert isinstance(error, InternalError)
    assert "division by zero" in str(error)
    assert isinstance(rig.ask(PROMPTS[1]).end(), PrefillDone)


def test_two_under_one_lease(rig: Rig) -> None:
    rig.engine.start()
    rig.model.hold()
    first = rig.ask(PROMPTS[2])
    second = replace_job(first, rig)
    rig.model.allow()
    assert isinstance(second.end(), LeaseError)
    assert isinstance(first.end(), PrefillDone)


def replace_job(request: Request, rig: Rig) -> Request:
    """The same prompt under the same lease, submitted again."""
    events: queue.SimpleQueue[PrefillProgress | PrefillDone | HeadwaterError] = queue.SimpleQueue()
    old = request.job
    job = PrefillJob("again", old.token_ids, old.lease, old.model, old.writer, events.put)
    rig.engine.submit(job)
    return Request(job, old.lease, events)


def test_too_many_waiting_are_refused_and_stopping_ends_all(rig: Rig) -> None:
    rig.engine = PrefillEngine(chunk_tokens=32, max_waiting=2)
    rig.engine.start()
    rig.model.hold()
    running = rig.ask(PROMPTS[0])
    rig.model.wait_for(0, 1)
    waiting = [rig.ask(PROMPTS[0]), rig.ask(PROMPTS[1])]
    with pytest.raises(ResourceError, match=r"2 prompts wait .* prefill\.max_waiting"):
        rig.ask(PROMPTS[3])
    assert rig.engine.num_pending_tokens == 2 * len(PROMPTS[0]) + len(PROMPTS[1])
    stopping = threading.Thread(target=rig.engine.stop)
    stopping.start()
    rig.model.allow()
    stopping.join(SECONDS)
    for request in (running, *waiting):
        assert isinstance(request.end(), UnavailableError)
    assert rig.engine.num_pending_tokens == 0


def test_calibration_measures_and_gives_way(rig: Rig) -> None:
    rig.engine.start()
    rig.model.hold()
    rig.engine.calibrate({1: cast("Model", rig.model)})
    rig.model.wait_for(0, 1)
    request = rig.ask(PROMPTS[1])
    rig.model.allow()
    assert isinstance(request.end(), PrefillDone)
    measured = rig.engine.costs.measured_passes
    rig.engine.calibrate({1: cast("Model", rig.model)})
    while rig.engine.costs.measured_passes == measured:
        pass
    assert rig.engine.costs.seconds(64) > 0.0
