"""One prompt on its way through the prefill engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


@dataclass(slots=True)
class PrefillJob:
    """A prompt, the lease to fill, and the model and the pool to do it with.

    `emit` is called from the engine's thread, last with PrefillDone or an error.
    """

    request_id: str
    token_ids: tuple[int, ...]
    lease: KvLease
    model: Model
    writer: KvWriter
    emit: Callable[[PrefillProgress | PrefillDone | HeadwaterError], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted_at: float = 0.0
