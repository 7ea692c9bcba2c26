"""The error tree: every leaf has a status, and survives the wire."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from headwater import errors
from headwater.wire.status import code_of, error_from_rpc, status_of


def leaves(
    kind: type[errors.HeadwaterError] = errors.HeadwaterError,
) -> Iterator[type[errors.HeadwaterError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from leaves(child)


def make(kind: type[errors.HeadwaterError]) -> errors.HeadwaterError:
    if issubclass(kind, errors.InvalidRequestError):
        return kind("sampling.top_p", "must be in (0, 1], got 7")
    if issubclass(kind, errors.ResourceError):
        return kind("no room", retry_after_ms=1250)
    return kind("what happened")


def over_the_wire(status: status_pb2.Status) -> errors.HeadwaterError:
    sent = rpc_status.to_status(status)
    return error_from_rpc(
        grpc.aio.AioRpcError(
            sent.code,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*sent.trailing_metadata),
            details=sent.details,
        )
    )


@pytest.mark.parametrize("kind", list(leaves()), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire(kind: type[errors.HeadwaterError]) -> None:
    error = make(kind)
    received = over_the_wire(status_of(error))
    assert type(received) is kind
    assert str(received) == str(error)
    if isinstance(error, errors.ResourceError) and isinstance(received, errors.ResourceError):
        assert received.retry_after_ms == error.retry_after_ms
    if isinstance(error, errors.InvalidRequestError):
        assert isinstance(received, errors.InvalidRequestError)
        assert received.field == error.field


def test_reasons_are_unique_and_readable() -> None:
    reasons = [kind.reason() for kind in leaves()]
    assert len(set(reasons)) == len(reasons)
    assert errors.KvExhaustedError.reason() == "KV_EXHAUSTED"


def test_drawing_names_every_class() -> None:
    assert errors.__doc__ is not None
    for kind in leaves():
        assert kind.__name__ in errors.__doc__


def test_a_status_from_grpc_itself_becomes_the_nearest_kind() -> None:
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="refused"
    )
    assert isinstance(error_from_rpc(failure), errors.UnavailableError)


def test_a_long_message_fits_into_metadata() -> None:
    status = status_of(errors.InvalidRequestError("text", "x" * 100_000))
    assert len(status.SerializeToString()) < 8192
    assert code_of(errors.InvalidRequestError("a", "b")) is grpc.StatusCode.INVALID_ARGUMENT
