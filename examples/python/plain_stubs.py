"""Streams an answer of Headwater's router with nothing but stubs made from the protos.

`python plain_stubs.py [options] PROMPT`, see --help. Ctrl-C cancels the request.
"""

import argparse
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headwater.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc


def report(failure: grpc.RpcError) -> None:
    """Prints what went wrong, from the details that every error of Headwater has."""
    print(f"\n{failure.code().name}: {failure.details()}", file=sys.stderr)
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
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50050")
    parser.add_argument("--chat", action="store_true", help="as a turn of a conversation")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    request = router_service_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    )
    if options.chat:
        request.chat.messages.add(role="user", content=options.prompt)
    else:
        request.text = options.prompt
    with grpc.insecure_channel(options.address) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        call = stub.Generate(request, timeout=options.deadline)
        try:
            for response in call:
                print(response.text, end="", flush=True)
                if response.HasField("usage"):
                    usage = response.usage
                    reason = generation_pb2.FinishReason.Name(response.finish_reason)
                    print(f"\n{reason}: {usage.prompt_tokens} prompt tokens, ", end="")
                    print(f"{usage.completion_tokens} new")
        except KeyboardInterrupt:
            call.cancel()
            print("\nCANCELLED", file=sys.stderr)
            return 1
        except grpc.RpcError as failure:
            report(failure)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
