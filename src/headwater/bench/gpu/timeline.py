"""Where a link's time goes during a sweep: copies, and what idle moments waited for.

Owns the measurement: the mark behind each item's copies tells the time, at no cost of its own. An
item that took longer than its bytes do waited for the host to queue it, or for its slot.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headwater.gpu.streams import Mark

_MOST_GAPS = 6
# Shorter ones are the link's own fluctuation.
_LEAST_GAP_S = 1e-3


class TimedQueues:
    """CUDA queues that note when copies are done; see headwater.gpu.streams."""

    def __init__(self, queues: Any) -> None:
        self.device: torch.device = queues.device
        self._queues = queues
        self._copied: list[tuple[Any, int, float]] = []
        self._latest = (0, 0.0)
        self._origin: tuple[Any, float] | None = None

    def begin(self) -> None:
        """Forgets what was; time zero is now."""
        torch.cuda.synchronize(self.device)
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._copied = []
        self._origin = event, time.perf_counter()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], share: float) -> None:
        """See Queues."""
        self._latest = sum(source.numel() for source in sources), time.perf_counter()
        self._queues.copy(targets, sources, share)

    def mark_copied(self) -> Mark:
        """See Queues."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(self._queues._copies)
        self._copied.append((event, *self._latest))
        return event  # type: ignore[no-any-return]

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
        """Of the `seconds` since `begin`; waits until all copies are done."""
        assert self._origin is not None
        torch.cuda.synchronize(self.device)
        origin, began_at = self._origin
        ends = [origin.elapsed_time(event) / 1e3 for event, _, _ in self._copied]
        spans = [end - before for end, before in zip(ends, [0.0, *ends], strict=False)]
        sizes = [num_bytes for _, num_bytes, _ in self._copied]
        usual = statistics.median(s / b for s, b in zip(spans, sizes, strict=True))
        moved = host = slots = 0.0
        gaps = []
        for number, (end, span, num_bytes) in enumerate(zip(ends, spans, sizes, strict=True)):
            inside = min(1.0, max(0.0, (seconds - (end - usual * num_bytes)) / (usual * num_bytes)))
            moved += num_bytes * inside
            gap = span - usual * num_bytes
            if gap > _LEAST_GAP_S and inside:
                before = ends[number - 1] if number else 0.0
                is_host = self._copied[number][2] - began_at > before
                host, slots = host + gap * is_host, slots + gap * (not is_host)
                gaps.append((gap, number, before, "host" if is_host else "slot"))
        gaps.sort(reverse=True)
        return {
            "moved_gb": moved / 1e9,
            "moved_gb_per_s": moved / seconds / 1e9,
            "usual_gb_per_s": 1 / usual / 1e9,
            "idle_for_host_s": host,
            "idle_for_slots_s": slots,
            "longest_gaps": [
                {"s": gap, "before_copy": number, "at_s": at, "for": cause}
                for gap, number, at, cause in gaps[:_MOST_GAPS]
            ],
        }
