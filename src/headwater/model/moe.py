"""The routed feed-forward layer: gate, experts, and the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.model.ffn import DenseFfn, gated
from headwater.model.gate import Gate
from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.linear import round_to_bf16
from headwater.model.source import WeightSource


class MoeFfn:
    """Weighted sum of the chosen experts' outputs, plus the shared expert's."""

    def __init__(self, spec: MoeFfnSpec, source: WeightSource) -> None:
        self._spec = spec
        self._gate = Gate(spec, source)
        experts = source.below("experts")
        self._is_dense = spec.experts_per_token == spec.num_experts
        self._all_gate_up = experts.matrix("gate_up")
        self._gate_up = experts.matrices("gate_up")
        self._down = experts.matrices("down")
        has_shared = spec.shared_intermediate_size > 0
        self._shared = DenseFfn(source.below("shared")) if has_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised hidden states, FP32 [T, hidden] -> FP32 [T, hidden]."""
        experts, weights = self._gate(x)
        rounded = round_to_bf16(x)
        run = self._run_all if self._is_dense else self._run_chosen
        out = run(rounded, experts, weights)
        return out if self._shared is None else out.add_(self._shared(rounded))

    def _run_all(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every expert sees every token, so that all their first products are one."""
        spec = self._spec
        by_expert = torch.empty_like(weights).scatter_(1, experts, weights)
        gate_up = self._all_gate_up.matmul(x).view(-1, spec.num_experts, 2, spec.intermediate_size)
        activated = gated(gate_up[:, :, 0], gate_up[:, :, 1])
        out = torch.zeros_like(x)
        for expert, down in enumerate(self._down):
            out.addcmul_(down.matmul(activated[:, expert]), by_expert[:, expert, None])
        return out

    def _run_chosen(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each expert that is hit sees its own tokens.

        Outputs are collected per token and summed in the order of the gate's choice, so that a
        token's result does not depend on what else is in the batch.
        """
        size = self._spec.intermediate_size
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
            activated = gated(gate_up[:, :size], gate_up[:, size:])
            collected[mine] = self._down[expert].matmul(activated)
        per_token = collected.view(*experts.shape, -1)
        return (per_token * weights[..., None]).sum(dim=1)
