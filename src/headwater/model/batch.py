"""What one forward pass computes: pieces of several sequences, packed one after the other.

Owns where each packed token belongs (sequence, position, KV block); holds no state between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """New tokens of one sequence; `start` is the position of the first, and all before are cached.

    `block_ids` are the sequence's KV blocks in order; they must reach to the last new token.
    `sequence_id` is the same in all passes over a sequence, whose tokens never change, and no other
    sequence's; None: nobody will ask. A model may remember by it what it has of the sequence.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sequence_id: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Where a sequence's new tokens lie in the batch: rows [first_row, first_row + num_new)."""

    first_row: int
    num_new: int
    start: int
    block_ids: Tensor
    sequence_id: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache once the new ones are written."""
        return self.start + self.num_new


@dataclass(frozen=True, slots=True)
class Batch:
    """T packed tokens: prompts, chunks of prompts and single decode tokens, in any mix.

    `token_ids`, `positions`, `blocks` and `offsets` are int64 [T]; token i's KV goes to
    `offsets[i]` of block `blocks[i]`. `last_rows`, int64 [sequences], are the rows of each
    sequence's last new token; `max_position` is the largest of `positions`.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    last_rows: Tensor
    max_position: int
    spans: tuple[SequenceSpan, ...]

    @classmethod
    def build(cls, chunks: Sequence[SequenceChunk], block_tokens: int) -> Batch:
        """Packs `chunks`, at least one, none of them empty."""
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        spans: list[SequenceSpan] = []
        for chunk in chunks:
            stop = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids, "a chunk holds at least one token"
            assert stop <= len(chunk.block_ids) * block_tokens, "blocks end before the tokens"
            block_ids = torch.tensor(chunk.block_ids, dtype=torch.int64)
            spans.append(
                SequenceSpan(
                    len(token_ids),
                    len(chunk.token_ids),
                    chunk.start,
                    block_ids,
                    chunk.sequence_id,
                )
            )
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, stop))
            blocks.extend(chunk.block_ids[p // block_tokens] for p in range(chunk.start, stop))
        assert spans, "a batch holds at least one chunk"
        position = torch.tensor(positions, dtype=torch.int64)
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=position,
            blocks=torch.tensor(blocks, dtype=torch.int64),
            offsets=position % block_tokens,
            last_rows=torch.tensor([s.first_row + s.num_new - 1 for s in spans]),
            max_position=max(positions),
            spans=tuple(spans),
        )

    def restricted(self, spans: Sequence[SequenceSpan]) -> PartOfBatch:
        """The part with `spans`, at least one of this batch's."""
        rows = torch.cat([torch.arange(s.first_row, s.first_row + s.num_new) for s in spans])
        counts = [span.num_new for span in spans]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        positions = self.positions[rows]
        part = Batch(
            token_ids=self.token_ids[rows],
            positions=positions,
            blocks=self.blocks[rows],
            offsets=self.offsets[rows],
            last_rows=torch.tensor([f + n - 1 for f, n in zip(firsts, counts, strict=True)]),
            max_position=int(positions.max()),
            spans=tuple(replace(s, first_row=f) for s, f in zip(spans, firsts, strict=True)),
        )
        return PartOfBatch(part, rows)


@dataclass(frozen=True, slots=True)
class PartOfBatch:
    """Some sequences of a batch; `rows`, int64 [T of the part], are their rows in the whole."""

    batch: Batch
    rows: Tensor
