"""What passes between a GPU and the CPU's experts: questions, answers, and both without a GPU.

Owns tickets: a count above 16 bits of the layer's index, so that no two in a row are equal. See
native/include/headwater/expert_worker.hpp for the other side.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater import _native
from headwater.errors import InternalError
from headwater.gpu.precision import rounded
from headwater.kernels.stored import stored_matrix
from headwater.memory_rate import last_level_cache_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.gpu.lane import Lane
    from headwater.gpu.resident import Norm, ResidentGate
    from headwater.kernels import WorkerPool
    from headwater.model.layer_spec import MoeFfnSpec
    from headwater.model.source import Weights

_ANSWER_SECONDS = 60.0
# Per CPU, where the kernel does not tell.
_LEAST_CACHE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pending:
    """What is still to be added to hidden states: FP32 pieces [pieces, T, hidden], and the answer
    of a routed layer from a lane."""

    pieces: Tensor | None = None
    lane: Lane | None = None
    layer: int = 0


def add_and_norm(
    hidden: Tensor, pending: Pending, norm: Norm | None, *, is_kept: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """FP32 hidden [T, hidden] += what is pending, for which it waits.

    Gives its norm in FP32, if it is kept, and in FP16; nothing without a norm.
    """
    if hidden.is_cuda:
        from headwater.gpu.kernels.handover import add_and_norm as on_gpu

        answer = None if pending.lane is None else (pending.lane, pending.layer)
        return on_gpu(hidden, pending.pieces, answer, norm, is_kept=is_kept)
    if pending.pieces is not None:
        hidden += pending.pieces.sum(dim=0)
    if pending.lane is not None:
        _await(pending.lane, pending.layer)
        hidden += pending.lane.output[: hidden.shape[0]]
    if norm is None:
        return None, None
    normal = norm(hidden)
    return normal, rounded(normal)


def ask(lane: Lane, layer: int, gate: ResidentGate, normal: Tensor) -> None:
    """Chooses experts for FP32 normal [T, hidden] and asks for them."""
    if normal.is_cuda:
        from headwater.gpu.kernels.gating import choose as on_gpu

        on_gpu(gate, normal, lane, layer)
        return
    rows = slice(0, normal.shape[0])
    experts, weights = gate(normal)
    lane.x[rows], lane.experts[rows], lane.weights[rows] = normal, experts.int(), weights
    lane.count += 1
    lane.posted.copy_(_ticket(lane, layer))


def predict(lane: Lane, layer: int, gate: ResidentGate, hidden: Tensor, norm: Norm) -> None:
    """Tells the CPU for which experts the next `ask` will probably ask, for `layer`.

    `hidden` is FP32 [T, hidden], T <= MOST_PREDICTED, from a layer earlier: a layer changes it
    little. The CPU, idle while the GPU computes attention, fetches weights into its caches. A wrong
    prediction costs no more than an idle read.
    """
    if hidden.is_cuda:
        from headwater.gpu.kernels.gating import predict as on_gpu

        on_gpu(gate, hidden, norm, lane, layer)
        return
    experts, _ = gate(norm(hidden))
    lane.predictions[: hidden.shape[0]] = experts
    lane.predicted.copy_(_ticket(lane, layer, ahead=1))


def _await(lane: Lane, layer: int) -> None:
    ticket, deadline = _ticket(lane, layer), time.monotonic() + _ANSWER_SECONDS
    while not torch.equal(lane.done, ticket):
        if time.monotonic() > deadline:
            raise InternalError(f"the experts of layer {layer} gave no answer")


class StoredExperts:
    """The routed experts of a layer for the CPU kernels, as they lie in shared memory.

    Raises ConfigError when they have a size or format that the kernels do not know.
    """

    def __init__(self, weights: Weights, layer: int, spec: MoeFfnSpec, pool: WorkerPool) -> None:
        gate_up = stored_matrix(weights, f"layers.{layer}.experts.gate_up")
        down = stored_matrix(weights, f"layers.{layer}.experts.down")
        self._kept = (gate_up, down, pool)
        self.experts_per_token = spec.experts_per_token
        # [experts, shards, 2], or [experts, 2] where they are whole.
        shards = gate_up.stack[1] if len(gate_up.stack) > 2 else 1
        self.native = _native.stored_experts(
            pool.native,
            gate_up.native,
            down.native,
            spec.num_experts,
            shards,
            spec.experts_per_token,
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes of weights, scales and zeros of one expert."""
        return self.native.expert_bytes


class ExpertWorker:
    """The CPU's side: computes `layers` for whichever lane asks, by a thread of its own.

    Keeps all memory that the thread uses. While a lane is open the pool belongs to the worker.
    """

    LAYER_BITS: int = _native.ExpertWorker.LAYER_BITS

    def __init__(
        self, pool: WorkerPool, layers: Sequence[StoredExperts], lanes: Sequence[Lane]
    ) -> None:
        self._kept = (pool, tuple(layers), tuple(lanes))
        self._native = _native.ExpertWorker(
            pool.native,
            [layer.native for layer in layers],
            [lane.addresses for lane in lanes],
            _read_ahead_bytes(pool),
        )

    @property
    def busy_seconds(self) -> float:
        """Time spent on computing, since the beginning."""
        return self._native.busy_ns / 1e9

    @property
    def num_answered(self) -> int:
        """Layers computed, since the beginning."""
        return self._native.num_answered

    @property
    def fetched_bytes(self) -> int:
        """Bytes of experts read ahead into caches, since the beginning."""
        return self._native.fetched_bytes

    @property
    def num_predicted(self) -> int:
        """Layers for which experts were read ahead, since the beginning."""
        return self._native.num_predicted

    @property
    def num_right(self) -> int:
        """Those of them whose likeliest expert was then asked for."""
        return self._native.num_right

    def open(self, lane: int, num_tokens: int) -> None:
        """The lane's tickets are answered from now on, for so many tokens each."""
        self._native.open(lane, num_tokens)

    def close(self, lane: int) -> None:
        """Nobody asks any more. Raises InternalError when what was asked for was not there."""
        self._native.close(lane)


def _read_ahead_bytes(pool: WorkerPool) -> int:
    """What the caches of the pool's CPUs hold beside what a step uses otherwise."""
    known = last_level_cache_bytes(pool.cpus or os.sched_getaffinity(0)) // 2
    return known or _LEAST_CACHE_BYTES * pool.num_threads


def _ticket(lane: Lane, layer: int, ahead: int = 0) -> Tensor:
    return ((lane.count + ahead) << ExpertWorker.LAYER_BITS) | layer
