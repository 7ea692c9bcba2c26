"""What engines need of a model, whichever way it is computed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headwater.kv.pages import KvPages
from headwater.model.batch import Batch
from headwater.model.spec import ModelSpec


class Model(Protocol):
    """A decoder-only model; see headwater.model.transformer for the reference."""

    spec: ModelSpec

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] -> hidden states before the first layer, FP32 [T, hidden]."""
        ...

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """One layer, FP32 [T, hidden] -> FP32 [T, hidden]; writes the layer's KV into `pages`."""
        ...

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """All layers over the batch's tokens: hidden states before the final norm, [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer, FP32 [n, hidden] -> FP32 [n, vocabulary]."""
        ...
