"""Two queues of work on one device, copies and computation, ordered by marks.

Owns the order alone: a mark stands for everything queued before it, and waiting for it holds back
the queue that waits, never the caller. HostQueues does everything at once, on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from headwater.gpu.pacing import Pacer

if TYPE_CHECKING:
    from collections.abc import Sequence


class Mark(Protocol):
    """A point in a queue."""

    def synchronize(self) -> None:
        """Holds the caller until the point is reached."""
        ...


class Queues(Protocol):
    """The copy queue and the compute queue; the caller computes on the latter."""

    device: torch.device

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], share: float) -> None:
        """Queues copies from host to device: bytes, contiguous, each of its target's length.

        Where `share`, in (0, 1], is less than one, a rest follows them that leaves them this share
        of the time.
        """
        ...

    def mark_copied(self) -> Mark:
        """A mark behind all copies queued so far."""
        ...

    def mark_computed(self) -> Mark:
        """A mark behind all computation queued so far."""
        ...

    def copying_waits(self, mark: Mark) -> None:
        """Copies queued from now on begin after `mark`."""
        ...

    def computing_waits(self, mark: Mark) -> None:
        """Computation queued from now on begins after `mark`."""
        ...


class CudaQueues:
    """A stream of its own for copies; computation is the current stream's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: Any = torch.cuda.Stream(device)
        self._pacer = Pacer(self._copies)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], share: float) -> None:
        """See Queues."""
        num_bytes = sum(source.numel() for source in sources)
        with torch.cuda.stream(self._copies):
            self._pacer.before()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._pacer.after(num_bytes, share)

    def mark_copied(self) -> Mark:
        """See Queues."""
        return self._mark(self._copies)

    def mark_computed(self) -> Mark:
        """See Queues."""
        return self._mark(torch.cuda.current_stream(self.device))

    def copying_waits(self, mark: Any) -> None:
        """See Queues."""
        self._copies.wait_event(mark)

    def computing_waits(self, mark: Any) -> None:
        """See Queues."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    @staticmethod
    def _mark(stream: Any) -> Mark:
        event: Any = torch.cuda.Event()
        event.record(stream)
        return event  # type: ignore[no-any-return]


class _Done:
    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class HostQueues:
    """Everything happens when it is queued."""

    device = torch.device("cpu")

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], share: float) -> None:  # noqa: ARG002
        """See Queues."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def mark_copied(self) -> Mark:
        """See Queues."""
        return _Done()

    def mark_computed(self) -> Mark:
        """See Queues."""
        return _Done()

    def copying_waits(self, mark: Mark) -> None:
        """See Queues."""

    def computing_waits(self, mark: Mark) -> None:
        """See Queues."""


def queues_on(device: torch.device) -> Queues:
    """The queues of a device."""
    return CudaQueues(device) if device.type == "cuda" else HostQueues()
