"""Hybrid decoding without a GPU: the CPU's worker is real, the other side is played by torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headwater.bench.timing import ReadProbe
from headwater.errors import InternalError
from headwater.gpu import hybrid_decoder
from headwater.gpu.hybrid_decoder import HybridDecoder, MicroBatch
from headwater.gpu.lane import Lane
from headwater.gpu.mailbox import ExpertWorker, Pending, StoredExperts, add_and_norm, ask, predict
from headwater.gpu.resident import Norm, ResidentGate
from headwater.kernels import WorkerPool
from headwater.model.batch import SequenceChunk
from headwater.model.layer_spec import LinearFormat, MoeFfnSpec
from headwater.model.linear import Scratch
from headwater.model.moe import MoeFfn
from headwater.model.source import WeightSource
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.weights.store import WeightsStore
from tests.gpu.models import pages_of, prompt, run, tiny_weights
from tests.gpu.samples import relative_error

CPU = torch.device("cpu")
LENGTH = 9


@contextmanager
def _mixtral(
    tmp_path: Path, shm_prefix: str
) -> Iterator[tuple[ModelSpec, WeightsStore, MoeFfnSpec]]:
    """A model all of whose layers have experts, and what those of the first are."""
    with tiny_weights(tmp_path, shm_prefix, "mixtral", "bf16") as (spec, weights):
        ffn = spec.layers[0].ffn
        assert isinstance(ffn, MoeFfnSpec)
        yield spec, weights, ffn


@pytest.mark.parametrize(
    ("architecture", "fmt", "shards"),
    [
        ("deepseek_v3", "bf16", 1),
        ("deepseek_v3", "fp8", 2),
        ("qwen3_moe", "int4", 1),
        ("mixtral", "mxfp4", 1),
    ],
)
def test_steps_agree_with_the_reference(
    tmp_path: Path, shm_prefix: str, architecture: str, fmt: LinearFormat, shards: int
) -> None:
    """Three sequences token by token, merged and as two micro-batches."""
    with tiny_weights(tmp_path, shm_prefix, architecture, fmt, shards) as (spec, weights):
        tokens = torch.tensor([prompt(spec, LENGTH, seed) for seed in range(3)])
        reference = Transformer(spec, weights)
        expected = []
        for row in tokens.tolist():
            chunk = SequenceChunk(row, 0, list(range(8)))
            expected.append(reference.logits(run(reference, pages_of(spec), chunk)))
        decoder = HybridDecoder(
            spec, weights, WorkerPool(2), CPU, max_rows=3, max_context=32, lanes=2
        )
        for parts in (
            [MicroBatch(0, 0, 3)],
            [MicroBatch(0, 0, 2), MicroBatch(1, 2, 1)],
        ):
            errors = []
            for position in range(LENGTH):
                at = torch.full((3,), position)
                hidden, _ = decoder.step(parts, tokens[:, position], at)
                logits = decoder.logits(hidden)
                errors += [relative_error(logits[row], expected[row][position]) for row in range(3)]
            errors.sort()
            # Some tokens are at a gate's near tie, or see one that is.
            assert errors[int(0.6 * len(errors))] < 2e-2
        assert decoder.worker is not None
        num_routed = sum(isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers)
        assert decoder.worker.num_answered == num_routed * 3 * LENGTH


def test_the_worker_answers_whichever_lane_asks(tmp_path: Path, shm_prefix: str) -> None:
    with _mixtral(tmp_path, shm_prefix) as (spec, weights, ffn):
        pool = WorkerPool(2)
        layers = [StoredExperts(weights, i, ffn, pool) for i in (0, 1)]
        lanes = [Lane(4, spec.hidden_size, ffn.experts_per_token, CPU) for _ in range(2)]
        worker = ExpertWorker(pool, layers, lanes)
        for turn in range(20):
            x = torch.randn(4, spec.hidden_size)
            lane, layer = turn % 2, turn // 2 % 2
            source = WeightSource(weights, Scratch(), spec.norm_eps, f"layers.{layer}.")
            moe = MoeFfn(ffn, source)
            hidden, norm = x.clone(), Norm(torch.ones(spec.hidden_size), spec.norm_eps)
            worker.open(lane, 4)
            normal, _ = add_and_norm(hidden, Pending(), norm)
            assert normal is not None
            weight = weights.tensor(f"layers.{layer}.gate").float()
            ask(lanes[lane], layer, ResidentGate(ffn, weight, None), normal)
            pieces = torch.randn(2, 4, spec.hidden_size)
            add_and_norm(hidden, Pending(pieces, lanes[lane], layer), None)
            worker.close(lane)
            found = hidden - x - pieces.sum(dim=0)
            assert relative_error(found, moe(normal)) < 5e-3
        assert worker.num_answered == 20
        assert worker.busy_seconds > 0


def test_predictions_change_nothing_but_what_is_read_ahead(
    tmp_path: Path, shm_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right ones, wrong ones and none: the same states to the last bit."""
    with tiny_weights(tmp_path, shm_prefix, "deepseek_v3", "fp8", 2) as (spec, weights):
        tokens = torch.tensor([3, 5])
        parts, found = [MicroBatch(0, 0, 2)], []
        wrong = torch.arange(spec.vocab_size)[None]
        ways: tuple[Callable[..., None], ...] = (
            predict,
            lambda lane, layer, spec, hidden, *_: _post_prediction(
                lane, layer, wrong[:, : lane.predictions.shape[1]], 1
            ),
            lambda *_: None,
        )
        for way in ways:
            monkeypatch.setattr(hybrid_decoder, "predict", way)
            decoder = HybridDecoder(spec, weights, WorkerPool(2), CPU, max_rows=2, max_context=32)
            for position in range(4):
                hidden, _ = decoder.step(parts, tokens + position, torch.full((2,), position))
            found.append(hidden)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_experts_are_read_ahead_until_the_question_comes(tmp_path: Path, shm_prefix: str) -> None:
    with _mixtral(tmp_path, shm_prefix) as (spec, weights, ffn):
        # Alone: of several workers one may come too late for its part.
        pool = WorkerPool(1)
        layers = [StoredExperts(weights, i, ffn, pool) for i in (0, 1)]
        lane = Lane(1, spec.hidden_size, 2, CPU)
        worker = ExpertWorker(pool, layers, [lane])
        worker.open(0, 1)
        for turn, (predicted, chosen) in enumerate((((1, 0), (1, 2)), ((3, 0), (0, 1)))):
            _post_prediction(lane, turn, torch.tensor([predicted]), 1)
            _until(lambda count=turn + 1: worker.num_predicted == count)  # type: ignore[misc]
            # Every other half of their tiles of rows of gate and up, of both experts.
            gate_and_up = 2 * ffn.intermediate_size * spec.hidden_size * 2
            assert worker.fetched_bytes == (turn + 1) * gate_and_up
            lane.experts.copy_(torch.tensor([chosen]))
            _post(lane, turn)
            add_and_norm(torch.zeros(1, spec.hidden_size), Pending(None, lane, turn), None)
            # Of the likeliest experts, 1 was asked for and 3 was not.
            assert worker.num_right == 1
        # A prediction for a question that was answered is late.
        _post_prediction(lane, 0, torch.tensor([[1, 0]]), 0)
        _post(lane, 0)
        add_and_norm(torch.zeros(1, spec.hidden_size), Pending(None, lane, 0), None)
        assert (worker.num_predicted, worker.num_right) == (2, 1)
        _post_prediction(lane, 0, torch.tensor([[1, 99]]), 1)
        with pytest.raises(InternalError, match="expert worker: expert 99 of"):
            _until(lambda: _closes(worker))


def test_a_closed_lane_leaves_the_pool_alone(tmp_path: Path, shm_prefix: str) -> None:
    """A step that failed leaves a prediction, or a question, that nobody waits for any more."""
    with _mixtral(tmp_path, shm_prefix) as (spec, weights, ffn):
        pool = WorkerPool(2)
        lane = Lane(1, spec.hidden_size, 2, CPU)
        worker = ExpertWorker(pool, [StoredExperts(weights, 0, ffn, pool)], [lane])
        probe = ReadProbe(pool, 1 << 20)
        for turn in range(300):
            worker.open(0, 1)
            if turn % 2:
                _post_prediction(lane, 0, torch.tensor([[0, 1]]), 1)
            else:
                _post(lane, 0)
            worker.close(0)
            answered, fetched = worker.num_answered, worker.fetched_bytes
            # By this thread, which must be the only one.
            assert probe.gb_per_s() > 0
            assert (worker.num_answered, worker.fetched_bytes) == (answered, fetched)


def _post(lane: Lane, layer: int) -> None:
    """As `ask` does, for whatever experts stand there."""
    lane.count += 1
    lane.posted.copy_(lane.count << ExpertWorker.LAYER_BITS | layer)


def _post_prediction(lane: Lane, layer: int, experts: torch.Tensor, ahead: int) -> None:
    """As `predict` does, for the question that is so many ahead."""
    lane.predictions.copy_(experts.expand_as(lane.predictions))
    lane.predicted.copy_((lane.count + ahead) << ExpertWorker.LAYER_BITS | layer)


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline


def _closes(worker: ExpertWorker) -> bool:
    """Closes the lane and opens it again: never content, but problems are raised."""
    worker.close(0)
    worker.open(0, 1)
    return False


def test_a_wrong_request_is_answered_and_reported(tmp_path: Path, shm_prefix: str) -> None:
    """The GPU must not wait for ever, whatever it asked for."""
    with _mixtral(tmp_path, shm_prefix) as (spec, weights, ffn):
        pool = WorkerPool(1)
        lane = Lane(1, spec.hidden_size, ffn.experts_per_token, CPU)
        worker = ExpertWorker(pool, [StoredExperts(weights, 0, ffn, pool)], [lane])
        x = torch.zeros(1, spec.hidden_size)
        for layer, expert, problem in ((7, 0, "layer 7 of 1"), (0, 99, "expert 99 of")):
            worker.open(0, 1)
            lane.experts.fill_(expert)
            _post(lane, layer)
            add_and_norm(x, Pending(None, lane, layer), None)
            with pytest.raises(InternalError, match=f"expert worker: {problem}"):
                worker.close(0)
        with pytest.raises(InternalError, match="expert worker: lane 1 with 1 tokens"):
            worker.open(1, 1)
