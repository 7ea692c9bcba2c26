"""Every error Headwater raises on purpose, and the status each one becomes on the wire.

    HeadwaterError
    ├── ConfigError                 a setting is missing, unknown or out of range
    ├── InvalidRequestError         the caller asked for something that cannot be
    │   └── PromptTooLongError      ... namely more tokens than the context or the pool holds
    ├── CheckpointError             a model folder is incomplete, broken or unknown
    ├── SegmentError                a shared-memory segment is refused
    │   ├── SegmentExistsError      ... somebody has made it already
    │   ├── SegmentNotFoundError    ... it is not there
    │   ├── SharedMemoryFullError   ... /dev/shm or RAM cannot hold it
    │   └── NotPermittedError       ... the kernel forbids what was asked for
    ├── LeaseError                  a KV lease is not alive
    │   └── StaleEpochError         ... because its pool has been replaced
    ├── ResourceError               no room now; worth another try
    │   ├── KvExhaustedError        ... in the KV pool
    │   ├── QueueFullError          ... in the router's queue
    │   └── OverloadedError         ... to be served in the time that its class promises
    ├── NotOfferedError             a method of a protocol that this server has no use for
    ├── UnavailableError            a peer is down, loading or stopping
    ├── DeadlineError               the caller's deadline passed
    ├── CancelledError              the caller cancelled
    └── InternalError               our own fault

Messages name the file, field or segment, the value, and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

StatusName = Literal[
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "ABORTED",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
]


class HeadwaterError(Exception):
    """Base of all errors; `status` is the name of the gRPC status code it maps to."""

    status: ClassVar[StatusName] = "INTERNAL"

    @classmethod
    def reason(cls) -> str:
        """Name for machines, such as KV_EXHAUSTED; the `reason` of google.rpc.ErrorInfo."""
        name = cls.__name__.removesuffix("Error")
        return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(name)).upper()


class ConfigError(HeadwaterError):
    """A setting is missing, unknown or out of range."""

    status: ClassVar[StatusName] = "FAILED_PRECONDITION"


class InvalidRequestError(HeadwaterError):
    """A request field holds a value that is not allowed; `field` is its path in the request."""

    status: ClassVar[StatusName] = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PromptTooLongError(InvalidRequestError):
    """The prompt, or prompt plus answer, exceeds what the model or the pool can hold."""


class CheckpointError(HeadwaterError):
    """A model folder is incomplete, broken or of an unknown kind."""

    status: ClassVar[StatusName] = "FAILED_PRECONDITION"


class SegmentError(HeadwaterError):
    """A shared-memory segment fails a check and is not used."""

    status: ClassVar[StatusName] = "FAILED_PRECONDITION"


class SegmentExistsError(SegmentError):
    """A segment of that name exists already."""

    status: ClassVar[StatusName] = "ALREADY_EXISTS"


class SegmentNotFoundError(SegmentError):
    """No segment of that name exists."""

    status: ClassVar[StatusName] = "NOT_FOUND"


class SharedMemoryFullError(SegmentError):
    """/dev/shm or memory cannot hold the segment."""

    status: ClassVar[StatusName] = "RESOURCE_EXHAUSTED"


class NotPermittedError(SegmentError):
    """The kernel forbids what was asked for, as a container's profile may."""

    status: ClassVar[StatusName] = "FAILED_PRECONDITION"


class LeaseError(HeadwaterError):
    """A KV lease is unknown, released or expired."""

    status: ClassVar[StatusName] = "NOT_FOUND"


class StaleEpochError(LeaseError):
    """A KV lease belongs to a pool that has been replaced."""

    status: ClassVar[StatusName] = "ABORTED"


class ResourceError(HeadwaterError):
    """No room at the moment; `retry_after_ms` says when another try makes sense."""

    status: ClassVar[StatusName] = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_ms: int = 500) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class KvExhaustedError(ResourceError):
    """The KV pool has too few free blocks or slots."""


class QueueFullError(ResourceError):
    """The router holds as many waiting requests as it may."""


class OverloadedError(ResourceError):
    """The request would wait longer for its first token than its class of objectives allows."""


class NotOfferedError(HeadwaterError):
    """The method is a part of its protocol, but this server does not offer it."""

    status: ClassVar[StatusName] = "UNIMPLEMENTED"


class UnavailableError(HeadwaterError):
    """A peer is down, still loading or stopping."""

    status: ClassVar[StatusName] = "UNAVAILABLE"


class DeadlineError(HeadwaterError):
    """The deadline passed before the work was done."""

    status: ClassVar[StatusName] = "DEADLINE_EXCEEDED"


class CancelledError(HeadwaterError):
    """The caller cancelled."""

    status: ClassVar[StatusName] = "CANCELLED"


class InternalError(HeadwaterError):
    """Something went wrong that never should; our fault."""
