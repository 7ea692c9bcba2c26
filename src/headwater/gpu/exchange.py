"""What ranks tell each other about a batch's rows: everybody's rows, and partial sums.

Owns the communication of small expert parallelism: hidden states are gathered unsorted, each rank
reduces what its experts give to one row per token, and only those rows travel back. See portion.py
for who has which rows and peers.py for how they travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwater.gpu.peers import Peers, Transfer
    from headwater.gpu.portion import Portion


class Exchange:
    """One rank's end; all ranks make the same calls in the same order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.rank = peers.rank
        self.world_size = peers.world_size
        self.sent_bytes = 0
        self._order: tuple[Portion, Tensor] | None = None

    def begin_gather(self, mine: Tensor, portion: Portion) -> Gathering:
        """Begins to send this rank's rows [n, ...] to all others and to receive theirs."""
        counts = [len(rows) for rows in portion.rows_by_rank]
        # As bytes, which every transport knows.
        sent = mine.flatten(1).contiguous().view(torch.uint8).repeat(self.world_size, 1)
        received = sent.new_empty(sum(counts), sent.shape[1])
        transfer = self._begin(received, sent, counts, [len(mine)] * self.world_size)
        return Gathering(transfer, self._order_on(mine.device, portion), mine)

    def gather(self, mine: Tensor, portion: Portion) -> Tensor:
        """This rank's rows [n, ...] -> all rows of the batch [T, ...], in the batch's order.

        Raises UnavailableError when another rank is gone.
        """
        return self.begin_gather(mine, portion).finish()

    def reduce(self, partial: Tensor, portion: Portion) -> Tensor:
        """Partial sums of all rows, FP32 [T, N] -> the sums of this rank's rows, FP32 [n, N].

        Ranks are added in their order. Raises UnavailableError when another rank is gone.
        """
        counts = [len(rows) for rows in portion.rows_by_rank]
        sent = partial[self._order_on(partial.device, portion)]
        num_mine = counts[self.rank]
        received = partial.new_empty(num_mine * self.world_size, partial.shape[1])
        self._begin(received, sent, [num_mine] * self.world_size, counts).finish()
        pieces = received.view(self.world_size, num_mine, partial.shape[1])
        total = pieces[0]
        for piece in pieces[1:]:
            total += piece
        return total

    def _begin(
        self, received: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int]
    ) -> Transfer:
        self.sent_bytes += sent.nbytes - sent[: sent_counts[self.rank]].nbytes
        return self._peers.begin_all_to_all(received, sent, received_counts, sent_counts)

    def _order_on(self, device: torch.device, portion: Portion) -> Tensor:
        """The batch's row of each row received, int64 [T]; made once per portion.

        To bring it to the device anew would wait for it, behind whatever weights are on the link.
        """
        if self._order is None or self._order[0] is not portion:
            self._order = portion, torch.cat(portion.rows_by_rank).to(device)
        return self._order[1]


class Gathering:
    """Rows on their way from all ranks."""

    def __init__(self, transfer: Transfer, order: Tensor, like: Tensor) -> None:
        self._transfer = transfer
        self._order = order
        self._like = like

    def finish(self) -> Tensor:
        """All rows of the batch [T, ...], in its order; raises as Exchange.gather does."""
        received = self._transfer.finish()
        out = torch.empty_like(received)
        out[self._order] = received
        return out.view(self._like.dtype).view(-1, *self._like.shape[1:])
