"""The head of a hybrid decoder: final norm and logits of a few tokens, a graph per number of them.

Owns the way back to the host: logits lie in pinned memory, as through pageable memory the copy
takes longer than some layers. They may be queued behind a step, so that one wait does for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.gpu.precision import rounded

if TYPE_CHECKING:
    from headwater.gpu.resident import Norm, ResidentMatrix


class DecodeHead:
    """For up to `max_rows` hidden states of `hidden_size` at a time. One thread at a time."""

    def __init__(
        self,
        norm: Norm,
        matrix: ResidentMatrix,
        max_rows: int,
        hidden_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._norm = norm
        self._matrix = matrix
        self._device = device
        is_cuda = device.type == "cuda"
        self._hidden = torch.zeros(max_rows, hidden_size, device=device)
        self._logits = torch.empty(max_rows, vocab_size, pin_memory=is_cuda)
        # One runs at a time, so that they may use the same memory.
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._graphs: dict[int, Any] = {}
        self._followed: Tensor | None = None

    def follow(self, hidden: Tensor | None) -> None:
        """Queues the logits of `hidden` on the current stream, if they were asked for before.

        Whoever asks for them once the stream is through finds them; with None nobody does.
        """
        self._followed = None
        if hidden is not None and hidden.shape[0] in self._graphs:
            self._hidden[: hidden.shape[0]].copy_(hidden, non_blocking=True)
            self._graphs[hidden.shape[0]].replay()
            self._followed = hidden

    def __call__(self, hidden: Tensor) -> Tensor:
        """FP32 [T, hidden] -> FP32 [T, vocabulary] on the host, overwritten by the next call."""
        count = hidden.shape[0]
        if hidden is self._followed:
            return self._logits[:count]
        self._followed = None
        self._hidden[:count].copy_(hidden, non_blocking=True)
        if self._device.type != "cuda":
            self._compute(count)
        elif count in self._graphs:
            self._graphs[count].replay()
            torch.cuda.current_stream(self._device).synchronize()
        else:
            self._compute(count)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._compute(count)
            # Capturing computes nothing.
            self._graphs[count] = graph
        return self._logits[:count]

    def _compute(self, count: int) -> None:
        found = self._matrix.product(rounded(self._norm(self._hidden[:count])))
        self._logits[:count].copy_(found, non_blocking=True)
