"""Where a link's time goes during a sweep: copies, and what idle moments waited for.

Owns the measurement: two events around every copy. A copy that begins later than the one before it
ended waited either for the host to queue it, or for its slot to be emptied.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headwater.gpu.streams import Mark

_MOST_GAPS = 6
# Shorter ones are the queue's own.
_LEAST_GAP_S = 2e-4


class TimedQueues:
    """CUDA queues that note when copies run; see headwater.gpu.streams."""

    def __init__(self, queues: Any) -> None:
        self.device: torch.device = queues.device
        self._queues = queues
        self._copies: list[tuple[Any, Any, int, float]] = []
        self._origin: tuple[Any, float] | None = None

    def begin(self) -> None:
        """Forgets what was; time zero is now."""
        torch.cuda.synchronize(self.device)
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._copies = []
        self._origin = event, time.perf_counter()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], share: float) -> None:
        """See Queues."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._queues._copies
        queued_at = time.perf_counter()
        begin.record(stream)
        self._queues.copy(targets, sources, share)
        end.record(stream)
        self._copies.append((begin, end, sum(s.numel() for s in sources), queued_at))

    def mark_copied(self) -> Mark:
        """See Queues."""
        return self._queues.mark_copied()  # type: ignore[no-any-return]

    def mark_computed(self) -> Mark:
        """See Queues."""
        return self._queues.mark_computed()  # type: ignore[no-any-return]

    def copying_waits(self, mark: Mark) -> None:
        """See Queues."""
        self._queues.copying_waits(mark)

    def computing_waits(self, mark: Mark) -> None:
        """See Queues."""
        self._queues.computing_waits(mark)

    def account(self, seconds: float) -> dict[str, Any]:
        """Of the `seconds` since `begin`, after which the device was synchronised."""
        assert self._origin is not None
        torch.cuda.synchronize(self.device)
        origin, began_at = self._origin
        busy = moved = host = slots = 0.0
        last_end, gaps = 0.0, []
        for number, (begin, end, num_bytes, queued_at) in enumerate(self._copies):
            first, stop = (origin.elapsed_time(event) / 1e3 for event in (begin, end))
            if first >= seconds:
                break
            inside = min(stop, seconds) - first
            busy += inside
            moved += num_bytes * inside / (stop - first)
            gap = first - last_end
            if gap > _LEAST_GAP_S:
                is_host = queued_at - began_at > last_end - _LEAST_GAP_S
                host, slots = host + gap * is_host, slots + gap * (not is_host)
                gaps.append((gap, number, last_end, "host" if is_host else "slot"))
            last_end = stop
        gaps.sort(reverse=True)
        return {
            "moved_gb": moved / 1e9,
            "moved_gb_per_s": moved / seconds / 1e9,
            "copying_s": busy,
            "copying_gb_per_s": moved / busy / 1e9,
            "idle_for_host_s": host,
            "idle_for_slots_s": slots,
            "idle_at_end_s": max(0.0, seconds - last_end),
            "longest_gaps": [
                {"s": gap, "before_copy": number, "at_s": at, "for": cause}
                for gap, number, at, cause in gaps[:_MOST_GAPS]
            ],
        }
