"""New keys and values from the device into the pool's pages, while the device goes on.

Owns the pinned staging memory and the queue of its own that fills it. A layer's entries are in the
pages when `finish` returns; nothing is written after that, so a lease that ends sees no late write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwater.gpu.portion import Portion
    from headwater.kv.pages import KvPages


class KvExport:
    """Exports one layer at a time: `begin`, other work, `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._staging = torch.empty(0)
        self._entries: Tensor | None = None
        self._done: Any = None

    def begin(self, entries: Tensor) -> None:
        """Starts to bring FP16 `entries`, [T, ...], to the host."""
        if not self._is_cuda:
            self._entries = entries
            return
        if self._staging.numel() < entries.numel():
            self._staging = torch.empty(entries.numel(), dtype=entries.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(entries.device))
        self._entries = self._staging[: entries.numel()].view(entries.shape)
        with torch.cuda.stream(self._stream):
            self._entries.copy_(entries, non_blocking=True)
            self._done = self._stream.record_event()
        # Its memory may be given to others only when this queue is done with it, too.
        entries.record_stream(self._stream)

    def finish(self, layer: int, portion: Portion, pages: KvPages) -> None:
        """Waits for the entries, those of the portion's rows, and writes them to their places."""
        assert self._entries is not None, "nothing was begun"
        if self._done is not None:
            self._done.synchronize()
        entries, self._entries = self._entries, None
        target = pages.layers[layer]
        if entries.dim() == 2:
            target[portion.blocks, portion.offsets] = entries
        else:
            target[portion.blocks, :, portion.offsets] = entries
