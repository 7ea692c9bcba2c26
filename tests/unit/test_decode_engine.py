"""The decode engine's bookkeeping, with a model that notices every wrong block.

The model keeps token ids in the KV pages and derives the next token from all of them, so that a
block lost, shared too early or computed twice changes the answer.
"""

from __future__ import annotations

import os
import queue
import random
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from headwater.errors import HeadwaterError, InternalError, KvExhaustedError, UnavailableError
from headwater.generation import FinishReason, SamplingParams, TokenEvent
from headwater.gpu.hybrid_model import HybridModel
from headwater.kv.hashing import block_hashes
from headwater.kv.layout import LAYOUT_VERSION, KvKind, KvLayout
from headwater.kv.memory import KvMemory
from headwater.kv.pool import KvPool
from headwater.services.decode.engine import DecodeEngine
from headwater.services.decode.sampler import SamplerState
from headwater.services.decode.sequence import Sequence
from headwater.services.decode.step_model import StepBytes, StepModel
from headwater.shm import Lifetime, Segment, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headwater.gpu.hybrid_decoder import HybridDecoder, MicroBatch
    from headwater.kv.pages import KvPages
    from headwater.model.batch import Batch
    from headwater.model.interface import Model

VOCAB = 200
BLOCK = 4
HIDDEN = 2
SECONDS = 60


class RememberingModel:
    """hidden = (next token, 0); BF16 holds token ids up to 256 exactly.

    Each token's page also holds the `mark` of the model that computed it, which counts for what
    follows: two models with different marks are as different as kernels for prompts and answers.
    """

    spec = SimpleNamespace(hidden_size=HIDDEN)

    def __init__(self, mark: int = 0) -> None:
        self.mark = mark
        self.pass_tokens: list[int] = []
        self.computed_tokens = 0

    def forward(self, batch: Batch, pages: KvPages) -> torch.Tensor:
        self.pass_tokens.append(len(batch.token_ids))
        self.computed_tokens += len(batch.token_ids)
        pages.layers[0][batch.blocks, batch.offsets, 0] = batch.token_ids.to(torch.float16)
        pages.layers[0][batch.blocks, batch.offsets, 1] = self.mark
        hidden = torch.zeros(len(batch.token_ids), HIDDEN)
        for span in batch.spans:
            marked = pages.layers[0][span.block_ids].float() @ torch.tensor([1.0, VOCAB])
            seen = marked.flatten()[: span.num_tokens].tolist()
            for row in range(span.num_new):
                history = seen[: span.start + row + 1]
                hidden[span.first_row + row, 0] = following([int(t) for t in history])
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(len(hidden), VOCAB)
        scores[torch.arange(len(hidden)), hidden[:, 0].long()] = 1.0
        return scores


class RememberingDecoder:
    """The device's part of a HybridModel: as RememberingModel, in the rows of its own cache.

    Few rows, and short ones: sequences have to leave and come back, and long ones stay outside.
    """

    max_rows, max_context, num_lanes = 3, 45, 2
    worker = None
    device = torch.device("cpu")

    def __init__(self, model: RememberingModel) -> None:
        self._model = model
        self.num_steps = 0
        self.fails_at = -1
        self.cache = torch.full((1, self.max_rows, self.max_context, 2), -7.0, dtype=torch.float16)

    def bound(self, num_tokens: int) -> int:
        return min(64, self.max_context)

    def has_run(self, parts: list[MicroBatch], bound: int) -> bool:
        return self.num_steps > 0

    def step(
        self, parts: list[MicroBatch], tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("CUDA error: out of luck")
        assert sum(part.size for part in parts) == len(tokens)
        self._model.pass_tokens.append(len(tokens))
        self._model.computed_tokens += len(tokens)
        rows = torch.arange(len(tokens))
        self.cache[0, rows, positions, 0] = tokens.to(torch.float16)
        self.cache[0, rows, positions, 1] = self._model.mark
        hidden = torch.zeros(len(tokens), HIDDEN)
        for row, position in enumerate(positions.tolist()):
            seen = self.cache[0, row, : position + 1].float() @ torch.tensor([1.0, VOCAB])
            hidden[row, 0] = following([int(t) for t in seen.tolist()])
        return hidden, self.cache[:, rows, positions]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def following(history: list[int]) -> int:
    value = len(history)
    for token in history:
        value = (value * 31 + token) % 1009
    return value % VOCAB


def expected(prompt: list[int], count: int, mark: int = 0) -> list[int]:
    tokens = [token + VOCAB * mark for token in prompt]
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


@dataclass
class Rig:
    """An engine on a pool, and requests to it."""

    model: RememberingModel
    decoder: RememberingDecoder | None
    pool: KvPool
    engine: DecodeEngine

    def ask(self, prompt: list[int], count: int, priority: int = 0) -> Request:
        """Starts a request that computes its own prompt; waits while the pool has no room."""
        names = block_hashes(prompt, BLOCK)
        while True:
            try:
                lease = self.pool.reserve("r", len(prompt), count, names)
                break
            except KvExhaustedError:
                os.sched_yield()
        lease = self.pool.pin(lease.segment.epoch, lease.lease_id, prompt, None)
        events: queue.SimpleQueue[TokenEvent | HeadwaterError] = queue.SimpleQueue()

        def emit(event: TokenEvent | HeadwaterError) -> None:
            if isinstance(event, HeadwaterError) or event.finish_reason is not None:
                self.pool.finish(lease)
            events.put(event)

        params = SamplingParams(temperature=0.0, max_tokens=count)
        sequence = Sequence(
            "r",
            lease,
            list(prompt),
            len(prompt),
            count,
            SamplerState.create(params, prompt, ()),
            emit,
            priority=priority,
            num_computed=lease.cached_tokens,
            block_ids=list(lease.block_ids),
        )
        self.engine.submit(sequence)
        return Request(sequence, events)


@dataclass
class Request:
    sequence: Sequence
    events: queue.SimpleQueue[TokenEvent | HeadwaterError]

    def tokens(self, stop_after: int | None = None) -> list[int]:
        """The answer; cancels after so many tokens."""
        got: list[int] = []
        while True:
            event = self.events.get(timeout=SECONDS)
            if isinstance(event, HeadwaterError):
                raise event
            got += [token.id for token in event.tokens]
            if stop_after is not None and len(got) >= stop_after:
                self.sequence.is_cancelled = True
            if event.finish_reason is not None:
                return got


@pytest.fixture(params=["cpu", "hybrid"])
def make_rig(shm_prefix: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """Answers by one model, or by a device and, where that has no room, by the same model."""
    made: list[tuple[Segment, Rig]] = []

    def make(
        num_blocks: int, max_batch: int = 8, extend_tokens: int = 6, prompt_mark: int = 0
    ) -> Rig:
        layout = KvLayout(KvKind.MLA, 1, num_blocks, BLOCK, 1, 2, 64, HIDDEN)
        segment = Segment.create(
            f"{shm_prefix}.kv",
            layout.payload_bytes,
            kind=SegmentKind.KV,
            lifetime=Lifetime.BOUND,
            epoch=1,
            layout_version=LAYOUT_VERSION,
        )
        segment.mark_ready()
        pool = KvPool(segment, layout, ttl_ms=10**6)
        model = RememberingModel()
        decoder = RememberingDecoder(model) if request.param == "hybrid" else None
        answers = cast("Model", model)
        if decoder is not None:
            answers = HybridModel(cast("HybridDecoder", decoder), answers)
        engine = DecodeEngine(
            answers,
            cast("Model", RememberingModel(prompt_mark) if prompt_mark else model),
            KvMemory(segment, layout),
            pool,
            StepModel(StepBytes(1, (), 1)),
            max_batch=max_batch,
            extend_tokens=extend_tokens,
        )
        engine.start()
        rig = Rig(model, decoder, pool, engine)
        made.append((segment, rig))
        return rig

    yield make
    for segment, rig in made:
        rig.engine.stop()
        segment.close()


def test_one_request(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(64)
    assert rig.ask([5, 6, 7], 20).tokens() == expected([5, 6, 7], 20)
    assert rig.pool.num_free_blocks == 64


def test_many_requests_in_a_pool_that_is_too_small(make_rig: Callable[..., Rig]) -> None:
    """Mixed lengths, common prefixes, cancellations, preemptions: all answers are right."""
    seed = 20261129
    rng = random.Random(seed)
    rig = make_rig(24)
    stems = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(3)]
    prompts = [
        [*rng.choice(stems)[: rng.randrange(1, 13)], *rng.choices(range(VOCAB), k=rng.randrange(9))]
        for _ in range(32)
    ]
    counts = [rng.randrange(1, 60) for _ in prompts]
    requests = [rig.ask(p, n, rng.randrange(2)) for p, n in zip(prompts, counts, strict=True)]
    for i, request in enumerate(requests):
        wanted = expected(prompts[i], counts[i])
        if i % 5 == 4:
            got = request.tokens(stop_after=3)
            assert got == wanted[: len(got)], f"seed {seed}, request {i}"
        else:
            assert request.tokens() == wanted, f"seed {seed}, request {i}"
    assert rig.engine.num_preemptions > 0
    assert rig.pool.num_leases == 0
    assert rig.pool.num_free_blocks == 24
    assert rig.decoder is None or rig.decoder.num_steps > 100


def test_a_device_that_fails_costs_nobody_an_answer(make_rig: Callable[..., Rig]) -> None:
    """In the middle of a step: the CPU goes on from the pages."""
    rig = make_rig(64)
    if rig.decoder is not None:
        rig.decoder.fails_at = 20
    requests = [rig.ask([i, i + 1], 30) for i in range(5)]
    for i, request in enumerate(requests):
        assert request.tokens() == expected([i, i + 1], 30)
    assert rig.decoder is None or rig.decoder.num_steps == 20


def test_prompts_and_answers_are_computed_each_by_its_model(make_rig: Callable[..., Rig]) -> None:
    """Also again after a preemption, in the middle of a block and of an answer."""
    rig = make_rig(20, prompt_mark=1)
    prompts = [[(i + 3 * j) % VOCAB for j in range(5 + i)] for i in range(8)]
    requests = [rig.ask(prompt, 30) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens() == expected(prompt, 30, mark=1)
    assert rig.engine.num_preemptions > 0


def test_a_second_turn_computes_only_what_is_new(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(64)
    first = list(range(40))
    answer = rig.ask(first, 24).tokens()
    before = rig.model.computed_tokens
    second = [*first, *answer, 7, 7, 7]
    assert rig.ask(second, 2).tokens() == expected(second, 2)
    # The answer's last token was never computed; blocks have 4 tokens.
    assert rig.model.computed_tokens - before <= 3 + BLOCK + 2


def test_a_long_prompt_does_not_hold_up_others(make_rig: Callable[..., Rig]) -> None:
    """While it extends, in chunks, the other request gets a token after each."""
    rig = make_rig(128, extend_tokens=6)
    short = rig.ask([1, 2, 3], 400)
    long = rig.ask([i % VOCAB for i in range(300)], 1)
    assert long.tokens() == expected([i % VOCAB for i in range(300)], 1)
    passes = list(rig.model.pass_tokens)
    assert passes.count(6) >= 300 // 6 - 1
    assert max(passes) == 6
    # The first pass is shared; then the other one generates.
    assert (6, 6) not in pairwise(passes[1:])
    assert short.tokens() == expected([1, 2, 3], 400)


def test_priority_goes_first(make_rig: Callable[..., Rig]) -> None:
    """With one place in the batch, the urgent request overtakes those that wait."""
    rig = make_rig(64, max_batch=1)
    running = rig.ask([1], 200)
    waiting = rig.ask([2], 5)
    urgent = rig.ask([3], 5, priority=1)
    order: list[str] = []
    waiting.sequence.emit = note(order, "waiting", waiting)
    urgent.sequence.emit = note(order, "urgent", urgent)
    running.tokens()
    assert urgent.tokens() == expected([3], 5)
    assert waiting.tokens() == expected([2], 5)
    assert order[0] == "urgent"


def note(
    order: list[str], name: str, request: Request
) -> Callable[[TokenEvent | HeadwaterError], None]:
    emit = request.sequence.emit

    def noting(event: TokenEvent | HeadwaterError) -> None:
        order.append(name)
        emit(event)

    return noting


def test_a_fault_of_ours_ends_the_requests_and_not_the_engine(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(64)
    with monkeypatch.context() as patched:
        patched.setattr(rig.pool, "grow", lambda _: 1 / 0)
        with pytest.raises(InternalError, match="division by zero"):
            rig.ask([1], 50).tokens()
    assert rig.ask([1], 50).tokens() == expected([1], 50)


def test_stopping_ends_everybody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(64)
    request = rig.ask([1], 250)
    first = request.events.get(timeout=SECONDS)
    assert isinstance(first, TokenEvent)
    assert first.finish_reason in (None, FinishReason.LENGTH)
    rig.engine.stop()
    with pytest.raises(UnavailableError):
        request.tokens()
