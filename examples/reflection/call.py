"""Calls any method of any gRPC server that has reflection; no proto files are needed.

`python call.py ADDRESS` lists the methods, `python call.py ADDRESS SERVICE/METHOD [JSON]` calls one
and prints each message that comes as a line of JSON. Ctrl-C cancels.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status


class Server:
    """A server and what it tells of itself."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def methods(self) -> Iterator[str]:
        """All methods, as one would declare them."""
        for name in self._database.get_services():
            for method in self._pool.FindServiceByName(name).methods:
                stream = "stream " if method.server_streaming else ""
                takes, gives = method.input_type.full_name, method.output_type.full_name
                yield f"{name}/{method.name}({takes}) returns ({stream}{gives})"

    def call(self, path: str, text: str, deadline: float) -> Any:
        """Starts a call with one message, given as JSON; iterating gives what comes."""
        service, _, name = path.rpartition("/")
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        request_class = GetMessageClass(method.input_type)
        start = self._channel.unary_stream(
            f"/{path}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return start(json_format.Parse(text, request_class()), timeout=deadline)


def report(failure: grpc.RpcError) -> None:
    """Prints what went wrong, from the details that every error of Headwater has."""
    print(f"{failure.code().name}: {failure.details()}", file=sys.stderr)
    status = rpc_status.from_call(failure)
    for detail in status.details if status else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            print(f"reason: {info.reason}", file=sys.stderr)
        elif detail.Unpack(bad):
            for violation in bad.field_violations:
                print(f"field: {violation.field}: {violation.description}", file=sys.stderr)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="host:port")
    parser.add_argument("method", nargs="?", help="such as headwater.v1.RouterService/Generate")
    parser.add_argument("json", nargs="?", default="{}", help="the request")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    with grpc.insecure_channel(options.address) as channel:
        server = Server(channel)
        if options.method is None:
            print(*server.methods(), sep="\n")
            return 0
        call = server.call(options.method, options.json, options.deadline)
        try:
            for response in call:
                print(json_format.MessageToJson(response, indent=None), flush=True)
        except KeyboardInterrupt:
            call.cancel()
            print("CANCELLED", file=sys.stderr)
            return 1
        except grpc.RpcError as failure:
            report(failure)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
