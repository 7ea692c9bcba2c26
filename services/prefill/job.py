"""One prompt on its way through the prefill engine."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.telemetry.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.errors import HeadwaterError
    from headwater.kv.lease import KvLease
    from headwater.kv.writer import KvWriter
    from headwater.model.interface import Model


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Work done and work in all, in tokens times layers."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt is computed; times in seconds."""

    computed_tokens: int
    queue_seconds: float
    compute_seconds: float


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt, the lease to fill, and the model and the pool to do it with.

    `emit` is called from the engine's thread, last with PrefillDone or an error. The KV of the
    first `num_computed` tokens lies in the lease's blocks. `held` holds the slot's writer lock from
    the first pass on; `stages` are noted by the engine's thread. `submitted_at` and `began_at` are
    time.monotonic() values.
    """

    request_id: str
    token_ids: tuple[int, ...]
    lease: KvLease
    model: Model
    writer: KvWriter
    emit: Callable[[PrefillProgress | PrefillDone | HeadwaterError], None]
    priority: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    held: ExitStack = field(default_factory=ExitStack)
    stages: Stages = field(default_factory=Stages)
    num_computed: int = 0
    submitted_at: float = 0.0
    began_at: float | None = None

    def __post_init__(self) -> None:
        self.num_computed = self.lease.cached_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed."""
        return len(self.token_ids) - self.num_computed

    def progress(self, done_token_layers: int) -> PrefillProgress:
        """Progress after `done_token_layers` of the pass under way."""
        layers, cached = self.lease.layout.num_layers, self.lease.cached_tokens
        before = (self.num_computed - cached) * layers
        return PrefillProgress(before + done_token_layers, (len(self.token_ids) - cached) * layers)
