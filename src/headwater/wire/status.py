"""Errors to and from google.rpc.Status with rich details.

Each status carries an ErrorInfo (domain "headwater.v1", reason such as KV_EXHAUSTED), a BadRequest
for InvalidRequestError and a RetryInfo for ResourceError, so that any client can tell what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from headwater import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

ERROR_DOMAIN = "headwater.v1"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
_DETAIL_KINDS: dict[str, type[Message]] = {
    "ErrorInfo": error_details_pb2.ErrorInfo,
    "BadRequest": error_details_pb2.BadRequest,
    "RetryInfo": error_details_pb2.RetryInfo,
}
# gRPC refuses metadata past 8 KiB; a message this long is cut.
MAX_MESSAGE_CHARS = 2000


def _leaves(root: type[errors.HeadwaterError]) -> Iterator[type[errors.HeadwaterError]]:
    yield root
    for child in root.__subclasses__():
        yield from _leaves(child)


_BY_REASON = {kind.reason(): kind for kind in _leaves(errors.HeadwaterError)}
# What a status means when it comes without our ErrorInfo, that is, from gRPC itself.
_BY_CODE: dict[grpc.StatusCode, type[errors.HeadwaterError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.CancelledError,
}
# Words of gRPC's own refusals, and which of our limits each one comes from.
_LIMITS = {
    "larger than max": "limits.message_bytes",
    "metadata size exceeds": "limits.metadata_bytes",
}


def code_of(error: errors.HeadwaterError) -> grpc.StatusCode:
    """The status code an error maps to."""
    return grpc.StatusCode[error.status]


def status_of(error: errors.HeadwaterError) -> status_pb2.Status:
    """The full status of an error."""
    message = str(error)[:MAX_MESSAGE_CHARS]
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason(), domain=ERROR_DOMAIN),
    ]
    if isinstance(error, errors.InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.problem[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ResourceError):
        seconds, milliseconds = divmod(error.retry_after_ms, 1000)
        delay = duration_pb2.Duration(seconds=seconds, nanos=milliseconds * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def error_from_rpc(failure: grpc.aio.AioRpcError) -> errors.HeadwaterError:
    """Rebuilds the peer's error; one that is not ours becomes the nearest of our kinds."""
    message = failure.details() or failure.code().name
    details = _details_in(failure)
    info = details.get("ErrorInfo")
    if info is None and failure.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _limit_error(message)
    if info is None:
        return _BY_CODE.get(failure.code(), errors.InternalError)(message)
    kind = _BY_REASON.get(info.reason, errors.InternalError)
    if issubclass(kind, errors.InvalidRequestError):
        violation = details["BadRequest"].field_violations[0]
        return kind(violation.field, violation.description)
    if issubclass(kind, errors.ResourceError):
        delay = details["RetryInfo"].retry_delay
        return kind(message, delay.seconds * 1000 + delay.nanos // 1_000_000)
    return kind(message)


def _limit_error(message: str) -> errors.HeadwaterError:
    for words, limit in _LIMITS.items():
        if words in message:
            return errors.InvalidRequestError("request", f"{message}; see {limit}")
    return errors.ResourceError(message)


def _details_in(failure: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Rich details by message name; empty when the status has none."""
    found: dict[str, Any] = {}
    for key, value in failure.trailing_metadata() or ():
        if key != STATUS_DETAILS_KEY or not isinstance(value, bytes):
            continue
        for packed in status_pb2.Status.FromString(value).details:
            for name, kind in _DETAIL_KINDS.items():
                if packed.TypeName() == f"google.rpc.{name}":
                    found[name] = kind.FromString(packed.value)
    return found
