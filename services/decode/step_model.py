"""How long a decode step takes, from the bytes it reads and from what steps have taken.

A step reads every dense weight once, the experts that its tokens choose, and the KV of its
requests. Of E experts, of which each token chooses k, B tokens choose E * (1 - (1 - k / E)**B)
different ones if all are equally likely. Each token adds some arithmetic of its own. What a byte
and what a token take is measured.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.costs import TwoPartFit
from headwater.model.layer_spec import MoeFfnSpec
from headwater.telemetry.rate import BusyRate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headwater.kv.layout import KvLayout
    from headwater.model.spec import ModelSpec
    from headwater.weights.tensors import TensorEntry

_EXPERTS = re.compile(r"layers\.(\d+)\.experts\.")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """All routed experts of one layer."""

    num_experts: int
    experts_per_token: int
    num_bytes: int

    def expected_bytes(self, num_tokens: float) -> float:
        """What so many tokens read, on average."""
        unused: float = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_bytes * (1.0 - unused)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Where the bytes of a step lie."""

    dense_bytes: int
    experts: tuple[RoutedExperts, ...]
    kv_bytes_per_token: int

    @classmethod
    def of_model(
        cls, spec: ModelSpec, entries: Iterable[TensorEntry], layout: KvLayout
    ) -> StepBytes:
        """From the tensors as they are stored."""
        by_layer: Counter[int] = Counter()
        dense_bytes = 0
        for entry in entries:
            if match := _EXPERTS.match(entry.name):
                by_layer[int(match[1])] += entry.num_bytes
            elif entry.name != "embed" or spec.is_embedding_tied:
                # An embedding is looked up, not read, unless it is the output matrix too.
                dense_bytes += entry.num_bytes
        experts = [
            RoutedExperts(layer.ffn.num_experts, layer.ffn.experts_per_token, by_layer[index])
            for index, layer in enumerate(spec.layers)
            if isinstance(layer.ffn, MoeFfnSpec)
        ]
        block_bytes = layout.block_bytes * layout.num_layers
        return cls(dense_bytes, tuple(experts), block_bytes // layout.block_tokens)

    def expected(self, num_tokens: float, context_tokens: float) -> float:
        """Bytes read by a step of `num_tokens` that attends to `context_tokens` in all."""
        routed = sum(layer.expected_bytes(num_tokens) for layer in self.experts)
        return self.dense_bytes + routed + self.kv_bytes_per_token * context_tokens


class StepModel:
    """Predicts step times; one thread observes, any may ask.

    `reading` holds the bytes of the steps against the time they took.
    """

    def __init__(self, step_bytes: StepBytes) -> None:
        self._bytes = step_bytes
        self._fit = TwoPartFit()
        self.reading = BusyRate()

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return self._fit.num_points > 0

    def observe(self, num_tokens: int, context_tokens: int, seconds: float) -> None:
        """Notes what a step took."""
        num_bytes = self._bytes.expected(num_tokens, context_tokens)
        self._fit.observe(num_tokens, num_bytes, seconds)
        self.reading.add(num_bytes, seconds)

    def seconds(self, num_tokens: float, context_tokens: float) -> float:
        """What a step would take; zero when nothing is known."""
        return self._fit.seconds(num_tokens, self._bytes.expected(num_tokens, context_tokens))
