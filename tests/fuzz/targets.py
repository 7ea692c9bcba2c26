"""Every method that a stack serves, and what a good call of it may look like."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from headwater.v1 import (
    decode_service_pb2,
    memory_service_pb2,
    prefill_service_pb2,
    router_service_pb2,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

GOOD_PROMPT = "Once more unto the breach, dear friends"
GOOD_TOKENS = 12
# Prompts that good requests and attacks on leases share, and with them blocks of the prefix cache.
SHARED_PROMPTS = tuple(tuple(random.Random(seed).choices(range(256), k=100)) for seed in range(3))
# What they name is not offered, and they say so.
UNOFFERED = frozenset({"Embed", "StartProfile", "StopProfile", "List"})

_COMMON = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
_OWN: dict[str, tuple[Any, ...]] = {
    "router": (
        router_service_pb2.DESCRIPTOR.services_by_name["RouterService"],
        vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
    ),
    "prefill": (prefill_service_pb2.DESCRIPTOR.services_by_name["PrefillService"],),
    "decode": (
        decode_service_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        memory_service_pb2.DESCRIPTOR.services_by_name["MemoryService"],
    ),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One method of one process; `is_ours` is False for health and reflection."""

    process: str
    path: str
    input_type: Descriptor
    is_ours: bool

    @property
    def name(self) -> str:
        """Without the service."""
        return self.path.rpartition("/")[2]


def all_methods() -> tuple[Method, ...]:
    """Those of every service of every process."""
    return tuple(
        Method(process, f"/{service.full_name}/{method.name}", method.input_type, service in own)
        for process, own in _OWN.items()
        for service in (*own, *_COMMON)
        for method in service.methods
    )


def good_requests() -> tuple[router_service_pb2.GenerateRequest, ...]:
    """Requests whose answers are the same each time."""
    requests = [good_generate()]
    for prompt in SHARED_PROMPTS:
        request = good_generate()
        request.token_ids.ids.extend(prompt)
        requests.append(request)
    return tuple(requests)


def good_generate() -> router_service_pb2.GenerateRequest:
    """The first of them."""
    request = router_service_pb2.GenerateRequest(text=GOOD_PROMPT)
    request.sampling.temperature = 0.0
    request.sampling.max_tokens = GOOD_TOKENS
    request.sampling.ignore_eos = True
    request.sampling.logprobs = 2
    return request


def good_message(method: Method) -> Message:
    """Something that the method would take, as a start for mutations."""
    if method.path == "/headwater.v1.RouterService/Generate":
        return good_generate()
    if method.path == "/vllm.grpc.engine.VllmEngine/Generate":
        request = vllm_engine_pb2.GenerateRequest(request_id="r", stream=True)
        request.tokenized.input_ids.extend(GOOD_PROMPT.encode())
        request.sampling_params.max_tokens = GOOD_TOKENS
        request.sampling_params.top_p = 0.9
        return request
    if method.name == "ReserveKv":
        return memory_service_pb2.ReserveKvRequest(
            request_id="r", prompt_tokens=40, max_new_tokens=8, block_hashes=[b"h" * 32]
        )
    if method.name == "Check":
        return health_pb2.HealthCheckRequest(service="headwater.v1.RouterService")
    if method.name == "ServerReflectionInfo":
        return reflection_pb2.ServerReflectionRequest(file_containing_symbol="headwater.v1.Usage")
    return GetMessageClass(method.input_type)()


def names_a_field(descriptor: Descriptor, path: str) -> bool:
    """Whether `path`, such as "lease.block_ids[3]", leads to a field, or a oneof, of a message."""
    message: Descriptor | None = descriptor
    for part in path.split("."):
        if message is None:
            return False
        name = re.sub(r"\[[^\]]*\]$", "", part)
        if name in message.oneofs_by_name:
            message = None
            continue
        field = message.fields_by_name.get(name)
        if field is None:
            return False
        message = field.message_type
    return True
