"""NativeTransformer: the whole model on the native kernels, with the face of model.Transformer.

Owns the native decoder and keeps the memory that it points to: weights and pool. The order of
operations is in native/src/model/; the reference for it is headwater.model.transformer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater import _native
from headwater._native import Mode
from headwater.errors import InternalError
from headwater.kernels.attention import native_batch
from headwater.kernels.checks import check_layout, check_tensor
from headwater.kernels.parts import DecoderParts
from headwater.kernels.pool import WorkerPool
from headwater.kv.pages import ENTRY_DTYPE, KvPages
from headwater.model.batch import Batch
from headwater.model.source import Weights
from headwater.model.spec import ModelSpec


class NativeTransformer:
    """A decoder-only model over `weights`, which it keeps alive and never copies.

    In Mode.DECODE linear layers are made for few tokens, in Mode.PREFILL for many. Within a mode a
    token's result is the same to the last bit whatever else is in the batch, however its prompt was
    cut, and however many threads the pool has. One thread at a time may call it, and the models of
    one pool are called one at a time. `isa` overrides the process's instruction set.

    Raises ConfigError when the weights have a size or format that the kernels do not know.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pool: WorkerPool,
        *,
        mode: Mode = Mode.DECODE,
        isa: str | None = None,
    ) -> None:
        self.spec = spec
        self._pool = pool
        self._parts = DecoderParts(weights, _native.Compute(pool.native, isa or "", mode))
        self._native = self._parts.decoder(spec)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] -> hidden states before the first layer, FP32 [T, hidden]."""
        check_tensor("token_ids", token_ids, torch.int64, (token_ids.numel(),))
        hidden = torch.empty(token_ids.numel(), self.spec.hidden_size)
        self._native.embed(token_ids.data_ptr(), token_ids.numel(), hidden.data_ptr())
        return hidden

    def forward_layer(self, index: int, hidden: Tensor, batch: Batch, pages: KvPages) -> Tensor:
        """One layer, FP32 [T, hidden] -> FP32 [T, hidden]; writes the layer's KV into `pages`."""
        num_tokens = batch.token_ids.numel()
        check_tensor("hidden", hidden, torch.float32, (num_tokens, self.spec.hidden_size))
        out = hidden.clone()
        page = self._page_address(index, pages)
        self._native.forward_layer(index, self._batch(batch, pages), out.data_ptr(), page)
        return out

    def forward(self, batch: Batch, pages: KvPages) -> Tensor:
        """All layers over the batch's tokens: hidden states before the final norm, [T, hidden]."""
        hidden = torch.empty(batch.token_ids.numel(), self.spec.hidden_size)
        addresses = [self._page_address(i, pages) for i in range(self.spec.num_layers)]
        self._native.forward(
            self._batch(batch, pages), batch.token_ids.data_ptr(), addresses, hidden.data_ptr()
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer, FP32 [n, hidden] -> FP32 [n, vocabulary]."""
        check_tensor("hidden", hidden, torch.float32, (hidden.shape[0], self.spec.hidden_size))
        out = torch.empty(hidden.shape[0], self.spec.vocab_size)
        self._native.logits(hidden.data_ptr(), hidden.shape[0], out.data_ptr())
        return out

    @staticmethod
    def _batch(batch: Batch, pages: KvPages) -> _native.TokenBatch:
        return native_batch(batch, pages.block_tokens, pages.layers[0].shape[0])

    def _page_address(self, layer: int, pages: KvPages) -> int:
        tensor = pages.layers[layer]
        kv = self.spec.layers[layer].kv
        if tensor.dtype != ENTRY_DTYPE or tensor.shape[-1] != kv.head_dim:
            raise InternalError(
                f"pages: expected FP16 with {kv.head_dim} elements last,"
                f" got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        check_layout("pages", tensor)
        return tensor.data_ptr()
