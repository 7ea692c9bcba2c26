"""Shared-memory segments: the typed face of the native core.

Owns the Python names of segments, handles and their clean-up. Does not own what lies in a payload:
see headwater.weights and headwater.kv. The bytes of a segment are laid out in
native/include/headwater/shm_header.hpp.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass

from headwater import _native
from headwater._native import LoadJob, SegmentView

DEFAULT_PREFIX = "headwater."
"""What the names of the product's segments start with, unless a configuration says otherwise."""

HEADER_BYTES = 4096


class SegmentKind(enum.Enum):
    """What a payload holds."""

    WEIGHTS = 1
    KV = 2


class Lifetime(enum.Enum):
    """Whether a segment dies with its owner or outlives all processes."""

    BOUND = 1
    PERSISTENT = 2


class SegmentState(enum.Enum):
    """How far a segment is; FOREIGN is anything in /dev/shm that fails a check."""

    FILLING = "filling"
    READY = "ready"
    POISONED = "poisoned"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """Names a segment and what its header must say; data that may travel and may go stale.

    `total_bytes` includes the header; `digest` has 32 bytes, or none where the content was made
    from nothing; `owner_pid` is for people and never checked.
    """

    name: str
    total_bytes: int
    epoch: int
    layout_version: int
    digest: bytes
    owner_pid: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One file in /dev/shm as a look from outside shows it.

    A FOREIGN one has its name and `problem`, the check that failed; all else is zero or None.
    `is_attached` counts everybody who maps it, its owner included.
    """

    name: str
    state: SegmentState
    problem: str
    kind: SegmentKind | None
    lifetime: Lifetime | None
    total_bytes: int
    is_sealed: bool
    epoch: int
    layout_version: int
    digest: bytes
    owner_pid: int
    created_unix_nano: int
    is_owner_alive: bool
    is_attached: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file, and the payload offset where they go."""

    path: str
    file_offset: int
    num_bytes: int
    dest_offset: int


class Segment:
    """A mapped shared-memory segment. Only the creator owns it; ownership moves by a named call.

    A context manager: leaving it closes the segment. Views outlive the closing and keep their
    memory mapped.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.Segment) -> None:
        self._native = native

    @classmethod
    def create(
        cls,
        name: str,
        payload_bytes: int,
        *,
        kind: SegmentKind,
        lifetime: Lifetime,
        epoch: int = 0,
        layout_version: int = 1,
        digest: bytes = b"",
    ) -> Segment:
        """Makes a segment in state FILLING, owned by this process, payload zeroed and writable.

        Raises SegmentExistsError, SharedMemoryFullError, or SegmentError for a bad name.
        """
        return cls(
            _native.Segment.create(
                name, payload_bytes, kind.value, lifetime.value, epoch, layout_version, digest
            )
        )

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        writable: bool = False,
        total_bytes: int | None = None,
        epoch: int | None = None,
        layout_version: int | None = None,
        digest: bytes | None = None,
    ) -> Segment:
        """Maps a READY segment; what is given must equal what its header says.

        Raises SegmentNotFoundError, or SegmentError that names the check and both values.
        """
        return cls(
            _native.Segment.attach(name, writable, total_bytes, epoch, layout_version, digest)
        )

    @classmethod
    def attach_handle(cls, handle: SegmentHandle, *, writable: bool = False) -> Segment:
        """Maps the segment of a handle, all of whose fields but the pid are checked.

        Raises as `attach` does.
        """
        return cls.attach(
            handle.name,
            writable=writable,
            total_bytes=handle.total_bytes,
            epoch=handle.epoch,
            layout_version=handle.layout_version,
            digest=handle.digest,
        )

    @property
    def name(self) -> str:
        """Name under /dev/shm."""
        return self._native.name

    @property
    def handle(self) -> SegmentHandle:
        """What another process needs to attach."""
        native = self._native
        return SegmentHandle(
            name=native.name,
            total_bytes=native.total_bytes,
            epoch=native.epoch,
            layout_version=native.layout_version,
            digest=native.digest,
            owner_pid=native.owner_pid,
        )

    @property
    def payload_bytes(self) -> int:
        """Size without the header."""
        return self._native.payload_bytes

    @property
    def state(self) -> SegmentState:
        """State at this moment; its owner may change it."""
        return SegmentState(self._native.state)

    @property
    def kind(self) -> SegmentKind:
        """What the payload holds."""
        return SegmentKind(self._native.kind)

    @property
    def lifetime(self) -> Lifetime:
        """Whether it outlives its owner."""
        return Lifetime(self._native.lifetime)

    @property
    def epoch(self) -> int:
        """The owner's count of its starts."""
        return self._native.epoch

    @property
    def is_owner(self) -> bool:
        """Whether this object holds the owner lock."""
        return self._native.is_owner

    @property
    def is_writable(self) -> bool:
        """Whether this object may write the payload."""
        return self._native.is_writable

    @property
    def is_sealed(self) -> bool:
        """Whether the payload never changes again."""
        return self._native.is_sealed

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._native.is_closed

    def seal(self) -> None:
        """Owner only: READY, and read-only for everybody from now on, this process included.

        Raises SegmentError while a writable view is alive.
        """
        self._native.seal()

    def mark_ready(self) -> None:
        """Owner only: READY, and still writable."""
        self._native.mark_ready()

    def poison(self) -> None:
        """Owner only: nobody may attach from now on."""
        self._native.poison()

    def unlink(self) -> None:
        """Owner only: takes the name away; what is mapped stays mapped."""
        self._native.unlink()

    def adopt_ownership(self) -> None:
        """Becomes the owner of an attached segment whose owner is gone.

        Raises SegmentError when its owner is alive.
        """
        self._native.adopt_ownership()

    def release_ownership(self) -> None:
        """Owner only: lets somebody else adopt the segment."""
        self._native.release_ownership()

    def close(self) -> None:
        """Unmaps, once the last view is gone; gives ownership up; unlinks an owned BOUND segment.

        May be called again.
        """
        self._native.close()

    def view(self, offset: int, num_bytes: int) -> SegmentView:
        """Payload bytes as an object with the buffer protocol; it keeps the memory mapped.

        Read-only unless the segment is writable. Raises SegmentError when out of bounds.
        """
        return self._native.view(offset, num_bytes)

    def populate(self, offset: int, num_bytes: int) -> None:
        """Backs payload bytes with memory, so that writing them later cannot fail.

        Raises SharedMemoryFullError.
        """
        self._native.populate(offset, num_bytes)

    def place(self, ranges: Sequence[tuple[int, int]], nodes: Sequence[int]) -> None:
        """Lets pages inside payload ranges (offset, bytes) come from one or all of `nodes` in turn.

        Pages that are there already stay where they are; pages on the edge of a range are left to
        chance. Raises NotPermittedError where the process may not, SegmentError for other reasons.
        """
        _native.place_pages(self._native, list(ranges), list(nodes))

    def nodes_of(self, offsets: Sequence[int]) -> list[int]:
        """The NUMA node of the page at each payload offset. Raises as `place` does."""
        return _native.nodes_of_pages(self._native, list(offsets))

    def load_u64(self, offset: int) -> int:
        """Reads the 64-bit word at a payload offset, a multiple of 8, with acquire order."""
        return self._native.load_u64(offset)

    def store_u64(self, offset: int, value: int) -> None:
        """Writes the 64-bit word at a payload offset, a multiple of 8, with release order."""
        self._native.store_u64(offset, value)

    def try_lock_slot(self, slot: int) -> bool:
        """Takes the writer lock of a slot; False when anybody holds it. Needs a writable segment.

        The kernel frees it when this process dies.
        """
        return self._native.try_lock_slot(slot)

    def unlock_slot(self, slot: int) -> None:
        """Gives a writer lock back. Raises SegmentError when this object does not hold it."""
        self._native.unlock_slot(slot)

    def fileno(self) -> int:
        """The file descriptor that all locks of this object hang on.

        Whoever is given a duplicate of it keeps them held, until both are closed.
        """
        return self._native.fileno()

    def is_slot_locked(self, slot: int) -> bool:
        """Whether anybody, this object included, holds the writer lock of a slot."""
        return self._native.is_slot_locked(slot)

    def start_load(self, pieces: Sequence[Piece], *, threads: int) -> LoadJob:
        """Starts to read file pieces into the payload, on native threads.

        Raises CheckpointError when a file is missing or too short for its pieces.
        """
        items = [(p.path, p.file_offset, p.num_bytes, p.dest_offset) for p in pieces]
        return _native.start_load(self._native, items, threads)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {'closed' if self.is_closed else self.state.value})"


def list_segments(prefix: str = DEFAULT_PREFIX) -> list[SegmentInfo]:
    """Every file in /dev/shm whose name starts with `prefix`, sorted by name; changes nothing."""
    return [_info(native) for native in _native.list_segments(prefix)]


def reap(prefix: str = DEFAULT_PREFIX, *, release_weights: bool = False) -> list[str]:
    """Removes what the dead left: BOUND segments without an owner, and unfinished ones.

    With `release_weights` also PERSISTENT segments that nobody owns or maps. Foreign files are left
    alone. Returns the names removed.
    """
    return _native.reap(prefix, release_weights)


def _info(native: _native.SegmentInfo) -> SegmentInfo:
    return SegmentInfo(
        name=native.name,
        state=SegmentState(native.state),
        problem=native.problem,
        kind=SegmentKind(native.kind) if native.kind else None,
        lifetime=Lifetime(native.lifetime) if native.lifetime else None,
        total_bytes=native.total_bytes,
        is_sealed=native.is_sealed,
        epoch=native.epoch,
        layout_version=native.layout_version,
        digest=native.digest,
        owner_pid=native.owner_pid,
        created_unix_nano=native.created_unix_nano,
        is_owner_alive=native.is_owner_alive,
        is_attached=native.is_attached,
    )
