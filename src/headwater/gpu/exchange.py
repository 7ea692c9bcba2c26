"""What ranks tell each other about a batch's rows: everybody's rows, and partial sums.

Owns the communication of small expert parallelism: hidden states are gathered unsorted, each rank
reduces what its experts give to one row per token, and only those rows travel back. See portion.py
for who has which rows. Over NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from headwater.errors import UnavailableError

if TYPE_CHECKING:
    from headwater.gpu.portion import Portion


class Exchange:
    """One rank's end of a process group; all ranks make the same calls in the same order."""

    def __init__(self, group: Any = None) -> None:
        """`group` is a torch process group; None: the default one."""
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.sent_bytes = 0

    def gather(self, mine: Tensor, portion: Portion) -> Tensor:
        """This rank's rows [n, ...] -> all rows of the batch [T, ...], in the batch's order.

        Raises UnavailableError when another rank is gone.
        """
        counts = [len(rows) for rows in portion.rows_by_rank]
        # As bytes, which every transport knows.
        sent = mine.flatten(1).contiguous().view(torch.uint8).repeat(self.world_size, 1)
        received = sent.new_empty(sum(counts), sent.shape[1])
        self._all_to_all(received, sent, counts, [len(mine)] * self.world_size)
        out = torch.empty_like(received)
        out[torch.cat(portion.rows_by_rank).to(mine.device)] = received
        return out.view(mine.dtype).view(-1, *mine.shape[1:])

    def reduce(self, partial: Tensor, portion: Portion) -> Tensor:
        """Partial sums of all rows, FP32 [T, N] -> the sums of this rank's rows, FP32 [n, N].

        Ranks are added in their order. Raises UnavailableError when another rank is gone.
        """
        counts = [len(rows) for rows in portion.rows_by_rank]
        sent = partial[torch.cat(portion.rows_by_rank).to(partial.device)]
        num_mine = counts[self.rank]
        received = partial.new_empty(num_mine * self.world_size, partial.shape[1])
        self._all_to_all(received, sent, [num_mine] * self.world_size, counts)
        pieces = received.view(self.world_size, num_mine, partial.shape[1])
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        return total

    def _all_to_all(
        self, received: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int]
    ) -> None:
        """Rows of `sent` to the ranks, and theirs into `received`, so many of each."""
        self.sent_bytes += sent.nbytes - sent[: sent_counts[self.rank]].nbytes
        try:
            dist.all_to_all_single(received, sent, received_counts, sent_counts, group=self._group)
        except RuntimeError as failure:
            raise UnavailableError(
                f"gpu: rank {self.rank} of {self.world_size} lost another one; the prompt is "
                f"given up: {str(failure).splitlines()[0]}"
            ) from failure
