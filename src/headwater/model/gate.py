"""The gates of routed layers: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.source import WeightSource


class Gate:
    """Scores in FP32 from hidden states that are not rounded: near ties must fall the right way."""

    def __init__(self, spec: MoeFfnSpec, source: WeightSource) -> None:
        self._spec = spec
        self._matrix = source.matrix("gate")
        self._bias = source.tensor("gate.bias").to(torch.float32) if spec.has_bias else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """FP32 [T, hidden] -> experts int64 [T, k], and their weights FP32 [T, k]."""
        return choose_experts(self._spec, self._matrix.matmul(x), self._bias)


def choose_experts(spec: MoeFfnSpec, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """FP32 logits [T, experts] -> experts int64 [T, k], and their weights FP32 [T, k].

    `bias`, FP32 [experts], is there for sigmoid_bias_group only; logits are overwritten.
    """
    if bias is None:
        weights, experts = logits.softmax(dim=-1).topk(spec.experts_per_token, dim=-1)
    else:
        scores = logits.sigmoid_()
        experts = _choose_by_group(spec, scores + bias)
        weights = scores.gather(1, experts)
    if spec.is_normalized:
        # The addend, DeepSeek's own, only matters when all chosen sigmoid scores vanish.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * spec.routed_scale


def _choose_by_group(spec: MoeFfnSpec, scores: Tensor) -> Tensor:
    """The best experts of the best groups; a group counts by the sum of its two best."""
    grouped = scores.view(scores.shape[0], spec.num_groups, -1)
    group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    groups = group_scores.topk(spec.groups_per_token, dim=-1).indices
    is_closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
    reachable = grouped.masked_fill(is_closed[..., None], float("-inf")).flatten(1)
    return reachable.topk(spec.experts_per_token, dim=-1).indices
