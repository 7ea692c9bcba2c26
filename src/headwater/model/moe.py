"""The routed feed-forward layer: gate, experts, and the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.model.ffn import DenseFfn, gated
from headwater.model.gate import Gate
from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.linear import round_activations
from headwater.model.source import WeightSource

_SHARDED_DIMENSIONS = 5


class MoeFfn:
    """Weighted sum of the chosen experts' outputs, plus the shared expert's.

    Experts may be cut into shards along their intermediate dimension; what the shards' down
    projections give is added.
    """

    def __init__(self, spec: MoeFfnSpec, source: WeightSource) -> None:
        self._spec = spec
        self._gate = Gate(spec, source)
        experts = source.below("experts")
        self._is_dense = spec.experts_per_token == spec.num_experts
        self._all_gate_up = experts.matrix("gate_up")
        self._gate_up = experts.matrices("gate_up")
        stacked = experts.tensor("gate_up")
        is_sharded = stacked.dim() == _SHARDED_DIMENSIONS
        self._num_shards = stacked.shape[1] if is_sharded else 1
        down = experts.matrices("down", 2 if is_sharded else 1)
        self._down = [
            down[first : first + self._num_shards]
            for first in range(0, len(down), self._num_shards)
        ]
        has_shared = spec.shared_intermediate_size > 0
        self._shared = DenseFfn(source.below("shared")) if has_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised hidden states, FP32 [T, hidden] -> FP32 [T, hidden]."""
        experts, weights = self._gate(x)
        rounded = round_activations(x)
        run = self._run_all if self._is_dense else self._run_chosen
        out = run(rounded, experts, weights)
        return out if self._shared is None else out.add_(self._shared(rounded))

    def _run_all(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every expert sees every token, so that all their first products are one."""
        spec = self._spec
        by_expert = torch.empty_like(weights).scatter_(1, experts, weights)
        gate_up = self._all_gate_up.matmul(x)
        gate_up = gate_up.view(x.shape[0], spec.num_experts, self._num_shards, 2, -1)
        activated = gated(gate_up[..., 0, :], gate_up[..., 1, :])
        out = torch.zeros_like(x)
        for expert in range(spec.num_experts):
            out.addcmul_(
                self._project_down(expert, activated[:, expert]), by_expert[:, expert, None]
            )
        return out

    def _run_chosen(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each expert that is hit sees its own tokens.

        Outputs are collected per token and summed in the order of the gate's choice, so that a
        token's result does not depend on what else is in the batch.
        """
        choices = experts.flatten()
        order = choices.argsort(stable=True)
        counts = choices.bincount(minlength=self._spec.num_experts).tolist()
        collected = x.new_empty(choices.shape[0], x.shape[1])
        first = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            mine = order[first : first + count]
            first += count
            gate_up = self._gate_up[expert].matmul(x[mine // experts.shape[1]])
            gate_up = gate_up.view(count, self._num_shards, 2, -1)
            activated = gated(gate_up[:, :, 0], gate_up[:, :, 1])
            collected[mine] = self._project_down(expert, activated)
        per_token = collected.view(*experts.shape, -1)
        return (per_token * weights[..., None]).sum(dim=1)

    def _project_down(self, expert: int, activated: Tensor) -> Tensor:
        """FP32 [n, shards, intermediate / shards] -> FP32 [n, hidden]."""
        shards = self._down[expert]
        out = shards[0].matmul(activated[:, 0])
        for shard in range(1, self._num_shards):
            out.add_(shards[shard].matmul(activated[:, shard]))
        return out
