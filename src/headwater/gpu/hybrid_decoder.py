"""Decoding with both: everything but the routed experts on the GPU, these on the CPU.

Owns a step: one CUDA graph per lane, number of sequences and bound on the context. Within it the
GPU asks the CPU for a layer's experts and computes the shared ones meanwhile. Two lanes may be
under way at once, one in attention while the other is in experts (see dual_batch.py). On a CPU
the same steps run without graphs. Which sequence is in which row of the cache is its caller's
business (see hybrid_model.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.gpu.decode_attention import Angles, GqaDecode, MlaDecode
from headwater.gpu.decode_head import DecodeHead
from headwater.gpu.lane import MOST_PREDICTED, Lane
from headwater.gpu.mailbox import (
    ExpertWorker,
    Pending,
    StoredExperts,
    add_and_norm,
    ask,
    predict,
)
from headwater.gpu.precedence import lane_queue
from headwater.gpu.precision import CACHED
from headwater.gpu.resident import GatedNetwork, ResidentGate, ResidentWeights
from headwater.model.layer_spec import GqaSpec, MoeFfnSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.kernels import WorkerPool
    from headwater.model.layer_spec import LayerSpec, RopeSpec
    from headwater.model.source import Weights
    from headwater.model.spec import ModelSpec

_LEAST_BOUND = 256


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences in rows [first_row, first_row + size) of the cache, over one lane."""

    lane: int
    first_row: int
    size: int


class HybridDecoder:
    """`max_rows` sequences of up to `max_context` tokens, over `lanes` lanes.

    `pool` is the experts' from the first step on. One thread at a time may call. Raises
    ConfigError when weights have a size or format that the kernels do not know.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pool: WorkerPool,
        device: torch.device,
        *,
        max_rows: int,
        max_context: int,
        lanes: int = 1,
    ) -> None:
        self.spec = spec
        self.device = device
        self.max_rows = max_rows
        self.max_context = max_context
        self.num_lanes = lanes
        self._weights = weights
        source = ResidentWeights(weights, device, spec.norm_eps, "")
        angles: dict[RopeSpec, Angles] = {}
        self._routed: list[StoredExperts] = []
        self._layers: list[_Layer] = []
        for index, layer in enumerate(spec.layers):
            rope = layer.attention.rope
            if rope not in angles:
                angles[rope] = Angles(rope, max_context, device)
            number = len(self._routed)
            if isinstance(layer.ffn, MoeFfnSpec):
                self._routed.append(StoredExperts(weights, index, layer.ffn, pool))
            below = source.below(f"layers.{index}")
            self._layers.append(_Layer(layer, below, angles[rope], number))
        self._head = DecodeHead(
            source.norm("final_norm"),
            source.matrix("embed" if spec.is_embedding_tied else "lm_head"),
            max_rows,
            spec.hidden_size,
            spec.vocab_size,
            device,
        )
        is_cuda = device.type == "cuda"
        self._hidden = torch.zeros(max_rows, spec.hidden_size, pin_memory=is_cuda)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, pin_memory=is_cuda)
        entry = self._layers[0].attention.entry_shape
        shape = (len(self._layers), max_rows, max_context, *entry)
        # FP16 [layers, rows, context, *entry].
        self.cache = torch.zeros(shape, dtype=CACHED, device=device)
        choices = max((m.experts_per_token for m in self._routed), default=1)
        self._lanes = [Lane(max_rows, spec.hidden_size, choices, device) for _ in range(lanes)]
        self.worker = ExpertWorker(pool, self._routed, self._lanes) if self._routed else None
        self._steps: dict[tuple[MicroBatch, int], _Step] = {}
        # Graphs of one lane never run at once, so that they may use the same memory.
        # A queue per lane: two that shared one in hardware would wait for each other's CPU.
        self.streams: list[Any] = [lane_queue(device) if is_cuda else None for _ in range(lanes)]
        self.pools = [torch.cuda.graph_pool_handle() if is_cuda else None for _ in range(lanes)]

    @property
    def expert_bytes(self) -> int:
        """Bytes of routed experts that one token reads, over all layers."""
        return sum(m.expert_bytes * m.experts_per_token for m in self._routed)

    def step(
        self, parts: Sequence[MicroBatch], tokens: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One token of each sequence: int64 [T] tokens at `positions`, both on the host.

        Gives hidden states after the last layer, FP32 [T, hidden], and the tokens' entries in the
        cache, FP16 [layers, T, *entry], both on the device. Rows are those of `parts`, one after
        the other.
        """
        bound = self.bound(int(positions.max()) + 1)
        steps = [self._step(part, bound) for part in parts]
        # Through pinned memory: nobody waits for these copies.
        self._hidden[: len(tokens)] = self._weights.tensor("embed")[tokens]
        self._positions[: len(tokens)] = positions
        first = 0
        for step in steps:
            rows = slice(first, first + step.part.size)
            step.hidden.copy_(self._hidden[rows], non_blocking=True)
            step.positions.copy_(self._positions[rows], non_blocking=True)
            first += step.part.size
        self._head.follow(None)
        self._open(parts)
        try:
            for step in steps:
                step.start(self._head if len(steps) == 1 else None)
            for step in steps:
                step.finish()
        finally:
            self._close(parts)
        for step in steps:
            step.capture()
        if len(steps) == 1:
            return steps[0].hidden, steps[0].entries
        hidden, entries = ([getattr(s, name) for s in steps] for name in ("hidden", "entries"))
        return torch.cat(hidden), torch.cat(entries, dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer, FP32 [T, hidden] -> FP32 [T, vocabulary].

        The result is on the host, and overwritten by the next call for no more than `max_rows`.
        """
        count = hidden.shape[0]
        if count > self.max_rows:
            pieces = [self.logits(rows).clone() for rows in hidden.split(self.max_rows)]
            return torch.cat(pieces)
        return self._head(hidden)

    def bound(self, num_tokens: int) -> int:
        """Tokens of context that a captured step reads: powers of two, so that few are captured."""
        bound = _LEAST_BOUND
        while bound < num_tokens:
            bound *= 2
        return min(bound, self.max_context)

    def compute(self, part: MicroBatch, hidden: Tensor, positions: Tensor, bound: int) -> Tensor:
        """A whole step, queued: FP32 [size, hidden] becomes the states after the last layer.

        Gives the tokens' entries, FP16 [layers, size, *entry].
        """
        lane = self._lanes[part.lane]
        cache = self.cache[:, part.first_row : part.first_row + part.size]
        pending = Pending()
        next_layers = (*self._layers[1:], None)
        for layer, following, own in zip(self._layers, next_layers, cache.unbind(), strict=True):
            pending = layer.add_to(hidden, pending, positions, own, bound, lane)
            if following is not None and part.size <= MOST_PREDICTED:
                following.predict_from(hidden, lane)
        add_and_norm(hidden, pending, None)
        return cache[:, torch.arange(part.size, device=self.device), positions]

    def has_run(self, parts: Sequence[MicroBatch], bound: int) -> bool:
        """Whether such steps are captured: the first of a kind takes longer."""
        return all((part, bound) in self._steps for part in parts)

    def warm_up(self) -> None:
        """Compiles and captures what first steps need, the largest first.

        Later graphs find room in the memory that the largest one has taken.
        """
        sizes = sorted({self.max_rows, min(2, self.max_rows), 1}, reverse=True)
        bounds = [self.max_context]
        while (lower := self.bound(-(-bounds[-1] // 2))) < bounds[-1]:
            bounds.append(lower)
        for bound in bounds:
            for size in sizes if bound == self.max_context else sizes[-2:]:
                for is_dual in (False, True) if size > 1 and self.num_lanes > 1 else (False,):
                    half = (size + 1) // 2
                    parts = [MicroBatch(0, 0, size)]
                    if is_dual:
                        parts = [MicroBatch(0, 0, half), MicroBatch(1, half, size - half)]
                    tokens = torch.zeros(size, dtype=torch.int64)
                    self.step(parts, tokens, torch.full((size,), bound - 1))
        self.logits(torch.zeros(1, self.spec.hidden_size, device=self.device))

    def _step(self, part: MicroBatch, bound: int) -> _Step:
        if (part, bound) not in self._steps:
            self._steps[part, bound] = _Step(self, part, bound)
        return self._steps[part, bound]

    def _open(self, parts: Sequence[MicroBatch]) -> None:
        if self.worker is not None:
            for part in parts:
                self.worker.open(part.lane, part.size)

    def _close(self, parts: Sequence[MicroBatch]) -> None:
        if self.worker is not None:
            for part in parts:
                self.worker.close(part.lane)


class _Step:
    """One kind of step, captured when it has run once, and the memory of its inputs and outputs.

    The first run is an ordinary one, in which kernels are compiled.
    """

    def __init__(self, decoder: HybridDecoder, part: MicroBatch, bound: int) -> None:
        device = decoder.device
        self.part = part
        self._decoder = decoder
        self._bound = bound
        self.hidden = torch.zeros(part.size, decoder.spec.hidden_size, device=device)
        self.positions = torch.zeros(part.size, dtype=torch.int64, device=device)
        self.entries = torch.empty(0)
        self._graph: Any = None
        self._stream: Any = decoder.streams[part.lane]
        # The caller sleeps meanwhile: CPUs that spin would be missing for the experts.
        self._done: Any = torch.cuda.Event(blocking=True) if self._stream is not None else None

    def start(self, head: DecodeHead | None) -> None:
        """Queues the step after what is queued on the current stream, and its logits behind it."""
        if self._stream is None:
            self._compute()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(self._stream):
            if self._graph is None:
                self._compute()
            else:
                self._graph.replay()
                if head is not None:
                    head.follow(self.hidden)
            self._done.record(self._stream)

    def finish(self) -> None:
        """Waits for the step."""
        if self._done is not None:
            self._done.synchronize()

    def capture(self) -> None:
        """Makes a graph of it, if there is none yet; what was computed stays."""
        if self._stream is None or self._graph is not None:
            return
        hidden, entries = self.hidden.clone(), self.entries.clone()
        torch.cuda.synchronize(self._decoder.device)
        graph = torch.cuda.CUDAGraph()
        pool = self._decoder.pools[self.part.lane]
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            self._compute()
        self._graph = graph
        self.hidden.copy_(hidden)
        self.entries.copy_(entries)
        torch.cuda.synchronize(self._decoder.device)

    def _compute(self) -> None:
        self.entries = self._decoder.compute(self.part, self.hidden, self.positions, self._bound)


class _Layer:
    """One layer; `number` counts the routed ones."""

    def __init__(
        self, spec: LayerSpec, weights: ResidentWeights, angles: Angles, number: int
    ) -> None:
        self._attention_norm = weights.norm("attention_norm")
        self._ffn_norm = weights.norm("ffn_norm")
        below = weights.below("attention")
        self.attention: GqaDecode | MlaDecode
        if isinstance(spec.attention, GqaSpec):
            self.attention = GqaDecode(spec.attention, below, angles)
        else:
            self.attention = MlaDecode(spec.attention, below, angles)
        self._number = number
        self._gate: ResidentGate | None = None
        self._network: GatedNetwork | None = None
        if not isinstance(spec.ffn, MoeFfnSpec):
            self._network = GatedNetwork(weights.below("ffn"))
            return
        if spec.ffn.shared_intermediate_size:
            self._network = GatedNetwork(weights.below("shared"))
        self._gate = ResidentGate.of(spec.ffn, weights)

    def predict_from(self, hidden: Tensor, lane: Lane) -> None:
        """Tells the CPU which experts it will ask for, if it does, from the layer before's state.

        What that layer's experts and this one's attention add to it is not known yet.
        """
        if self._gate is not None:
            predict(lane, self._number, self._gate, hidden, self._ffn_norm)

    def add_to(
        self,
        hidden: Tensor,
        pending: Pending,
        positions: Tensor,
        cache: Tensor,
        bound: int,
        lane: Lane,
    ) -> Pending:
        """hidden, FP32 [T, hidden], += what is pending, and attention; what the experts add is
        pending then."""
        _, x = add_and_norm(hidden, pending, self._attention_norm)
        assert x is not None
        pieces = self.attention(x, positions, cache, bound)
        is_routed = self._gate is not None
        normal, x = add_and_norm(hidden, Pending(pieces), self._ffn_norm, is_kept=is_routed)
        assert x is not None
        if self._gate is None:
            assert self._network is not None
            return Pending(self._network.pieces(x))
        assert normal is not None
        ask(lane, self._number, self._gate, normal)
        terms = None if self._network is None else self._network.pieces(x)
        return Pending(terms, lane, self._number)
