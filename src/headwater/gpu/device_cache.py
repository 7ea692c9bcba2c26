"""Keys and values of running sequences on the device: a copy of what the pool's pages hold.

Owns the way from the pages to the rows and back. The pages stay the truth: every token's entry is
in them when a step is over, so that a row may be dropped at any time and be filled again later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.gpu.row_table import RowTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.gpu.row_table import Swap
    from headwater.kv.pages import KvPages
    from headwater.model.batch import SequenceSpan


class DeviceCache:
    """`cache` is the decoder's, FP16 [layers, rows, context, *entry]."""

    def __init__(self, cache: Tensor) -> None:
        self.table = RowTable(cache.shape[1])
        self._cache = cache
        self._is_cuda = cache.is_cuda
        # Two, so that one is filled while the other is on its way.
        self._staging = [
            torch.empty(cache.shape[2:], dtype=cache.dtype, pin_memory=self._is_cuda)
            for _ in range(2)
        ]
        self._stream: Any = torch.cuda.Stream(cache.device) if self._is_cuda else None
        self._sent: list[Any] = [torch.cuda.Event() if self._is_cuda else None for _ in range(2)]
        self.pulled_bytes = 0

    def arrange(self, spans: Sequence[SequenceSpan], pages: KvPages) -> list[SequenceSpan]:
        """The spans in the order of rows 0, 1, ...; all tokens before theirs are in the rows.

        Work queued on the current stream from now on sees them.
        """
        by_id = {span.sequence_id: span for span in spans}
        assert None not in by_id
        assert len(by_id) == len(spans), "a sequence has one token per step"
        ids = [sequence_id for sequence_id in by_id if sequence_id is not None]
        for swap in self.table.arrange(ids):
            self._swap(swap)
        ordered = []
        for number, row in enumerate(self.table.rows[: len(spans)]):
            assert row is not None
            span = by_id[row.sequence_id]
            row.num_tokens = min(row.num_tokens, span.start)
            if row.num_tokens < span.start:
                self._pull(number, row.num_tokens, span, pages)
                row.num_tokens = span.start
            ordered.append(span)
        if self._stream is not None:
            torch.cuda.current_stream(self._cache.device).wait_stream(self._stream)
        return ordered

    def written_elsewhere(self, span: SequenceSpan) -> None:
        """The span's tokens were computed without the device, whose own are out of date."""
        row = None if span.sequence_id is None else self.table.find(span.sequence_id)
        if row is not None:
            row.num_tokens = min(row.num_tokens, span.start)

    def export(self, spans: Sequence[SequenceSpan], entries: Tensor, pages: KvPages) -> None:
        """After a step: `entries`, FP16 [layers, T, *entry], go to the spans' pages."""
        blocks = torch.stack([s.block_ids[s.start // pages.block_tokens] for s in spans])
        offsets = torch.tensor([span.start % pages.block_tokens for span in spans])
        for layer, found in zip(pages.layers, entries.cpu(), strict=True):
            if found.dim() == 2:
                layer[blocks, offsets] = found
            else:
                layer[blocks, :, offsets] = found
        for span, row in zip(spans, self.table.rows, strict=False):
            assert row is not None
            row.num_tokens = span.start + 1

    def _pull(self, row: int, start: int, span: SequenceSpan, pages: KvPages) -> None:
        """Tokens [start, span.start) from the pages, early layers first."""
        size = pages.block_tokens
        blocks = span.block_ids[start // size : -(-span.start // size)]
        skipped = start % size
        count = span.start - start
        for number, layer in enumerate(pages.layers):
            found = layer.index_select(0, blocks)
            if found.dim() == 5:
                # [blocks, 2, tokens, heads, dim]: keys and values of a token side by side.
                found = found.transpose(1, 2)
            found = found.flatten(0, 1)[skipped : skipped + count]
            turn = number % 2
            target, staging = self._cache[number, row, start : span.start], self._staging[turn]
            if self._stream is None:
                target.copy_(found)
                continue
            self._sent[turn].synchronize()
            staging[:count].copy_(found)
            if number == 0:
                # Steps so far may still read what is overwritten.
                self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
            with torch.cuda.stream(self._stream):
                target.copy_(staging[:count], non_blocking=True)
                self._sent[turn].record(self._stream)
        self.pulled_bytes += count * self._cache[:, 0, 0].numel() * self._cache.element_size()

    def _swap(self, swap: Swap) -> None:
        """On the current stream, layer by layer."""
        first, second, tokens = swap.first, swap.second, slice(0, swap.num_tokens)
        for layer in self._cache if swap.num_tokens else ():
            kept = layer[first, tokens].clone()
            layer[first, tokens] = layer[second, tokens]
            layer[second, tokens] = kept
