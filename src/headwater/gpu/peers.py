"""The processes that compute prompts together: how they find and reach one another.

Owns the process group. NCCL between different GPUs; gloo where that cannot be, on CPUs and where
one GPU has several ranks, with copies through host memory. They meet in a file, and listen on
loopback alone.
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed as dist

from headwater.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

Transport = Literal["nccl", "gloo"]

# A transfer that takes longer has lost its partner.
_TIMEOUT_SECONDS = 600


class Peers:
    """One rank's end; all ranks make the same calls in the same order."""

    def __init__(self, group: Any, rank: int, world_size: int, transport: Transport) -> None:
        """`group` is a torch process group's backend of `world_size` ranks."""
        self.rank = rank
        self.world_size = world_size
        self.transport = transport
        self._group = group

    @classmethod
    def meet(cls, meeting: Path, rank: int, world_size: int, transport: Transport) -> Peers:
        """Waits for the others at `meeting`, a file that nobody has used before.

        A rank on a GPU has made it the current device. Raises UnavailableError when they do not
        come.
        """
        timeout = datetime.timedelta(seconds=_TIMEOUT_SECONDS)
        # Read when the first message is sent. Bootstrap and gloo listen where these say.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # Others on the host may share the switch that multicast needs.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        try:
            backends: Any = dist
            store = backends.FileStore(str(meeting), world_size)
            if transport == "nccl":
                options = backends.ProcessGroupNCCL.Options()
                options._timeout = timeout
                group = backends.ProcessGroupNCCL(store, rank, world_size, options)
            else:
                options = backends.ProcessGroupGloo._Options()
                options._devices = [backends.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                options._timeout = timeout
                group = backends.ProcessGroupGloo(store, rank, world_size, options)
        except RuntimeError as failure:
            raise UnavailableError(
                f"gpu: rank {rank} of {world_size} did not meet the others: {_reason(failure)}"
            ) from failure
        return cls(group, rank, world_size, transport)

    def begin_all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
    ) -> Transfer:
        """Begins to send rows of `sent` to the ranks, so many to each, and theirs to `received`.

        Neither may be touched before the transfer has been finished.
        """
        via_host = self.transport == "gloo" and sent.is_cuda
        source = sent.cpu() if via_host else sent
        target = torch.empty(received.shape, dtype=received.dtype) if via_host else received
        options = dist.AllToAllOptions()
        # Otherwise what is queued after it would wait for it.
        options.asyncOp = True
        try:
            work = self._group.alltoall_base(
                target, source, list(received_counts), list(sent_counts), options
            )
        except RuntimeError as failure:
            raise self._lost(failure) from failure
        return Transfer(self, work, source, target, received)

    def barrier(self) -> None:
        """Waits until all ranks are here. Raises UnavailableError when one is gone."""
        device = torch.device("cuda") if self.transport == "nccl" else torch.device("cpu")
        ones = torch.ones(self.world_size, 1, device=device)
        each = [1] * self.world_size
        self.begin_all_to_all(torch.empty_like(ones), ones, each, each).finish()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def _lost(self, failure: RuntimeError) -> UnavailableError:
        return UnavailableError(
            f"gpu: rank {self.rank} of {self.world_size} lost another one; the prompt is given up: "
            f"{_reason(failure)}"
        )


class Transfer:
    """A transfer under way; what it reads and writes is kept until it is finished."""

    def __init__(
        self, peers: Peers, work: Any, source: Tensor, target: Tensor, received: Tensor
    ) -> None:
        self._peers = peers
        self._work = work
        self._source: Tensor | None = source
        self._target = target
        self._received = received

    def finish(self) -> Tensor:
        """What was received; what is computed from now on may use it.

        Raises UnavailableError when another rank is gone.
        """
        try:
            self._work.wait()
        except RuntimeError as failure:
            raise self._peers._lost(failure) from failure
        self._source = None
        if self._target is not self._received:
            self._received.copy_(self._target)
        return self._received


def _reason(failure: RuntimeError) -> str:
    """The sentence of a message that begins with a place in a source file and ends with advice."""
    line = str(failure).splitlines()[0]
    if line.startswith("["):
        line = line.partition("] ")[2] or line
    return line.partition(". ")[0]
