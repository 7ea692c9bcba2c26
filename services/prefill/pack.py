"""One pass under way: the packed tokens of several prompts between two layers.

A prompt can be taken out between layers. Its rows are then neither computed nor written any more,
and the others' results stay the same to the last bit, since no row depends on another prompt's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwater.model.batch import Batch, SequenceChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.services.prefill.job import PrefillJob
    from headwater.services.prefill.scheduler import Share


class Pack:
    """The shares of one pass, at least one, all of one model and one pool."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = list(shares)
        self._model = shares[0].job.model
        self._memory = shares[0].job.writer.memory
        self._batch = self._packed()
        self._hidden = self._model.embed(self._batch.token_ids)

    @property
    def num_layers(self) -> int:
        """Layers to go through."""
        return self._memory.layout.num_layers

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts that are left."""
        return sum(share.num_tokens for share in self.shares)

    def drop(self, job: PrefillJob) -> None:
        """Takes a prompt out; from now on nothing is written to its blocks."""
        first_row = 0
        kept: list[torch.Tensor] = []
        for share in self.shares:
            rows = self._hidden[first_row : first_row + share.num_tokens]
            first_row += share.num_tokens
            if share.job is not job:
                kept.append(rows)
        self.shares = [share for share in self.shares if share.job is not job]
        if self.shares:
            self._batch = self._packed()
            self._hidden = torch.cat(kept)

    def forward_layer(self, layer: int) -> None:
        """Computes one layer for all prompts that are left, at least one."""
        self._hidden = self._model.forward_layer(
            layer, self._hidden, self._batch, self._memory.pages
        )

    def leave_hidden(self, job: PrefillJob) -> None:
        """Writes the state after the last layer, of the prompt's last row, into its slot."""
        index = next(i for i, share in enumerate(self.shares) if share.job is job)
        self._memory.hidden[job.lease.slot] = self._hidden[self._batch.last_rows[index]]

    def _packed(self) -> Batch:
        chunks = []
        for share in self.shares:
            job, start = share.job, share.job.num_computed
            token_ids = job.token_ids[start : start + share.num_tokens]
            chunks.append(SequenceChunk(token_ids, start, job.lease.block_ids))
        return Batch.build(chunks, self._memory.layout.block_tokens)
