"""The three engine calls by hand: `python examples/reserve_prefill_decode.py [PREFILL DECODE]`.

What the router does for every request, without text: token ids in, token ids out.
"""

import sys

import grpc

from headwater.v1 import decode_service_pb2 as decode_pb
from headwater.v1 import decode_service_pb2_grpc as decode_grpc
from headwater.v1 import generation_pb2
from headwater.v1 import memory_service_pb2 as memory_pb
from headwater.v1 import memory_service_pb2_grpc as memory_grpc
from headwater.v1 import prefill_service_pb2 as prefill_pb
from headwater.v1 import prefill_service_pb2_grpc as prefill_grpc

PROMPT = [72, 101, 108, 108, 111]
prefill_address, decode_address = sys.argv[1:3] or ("127.0.0.1:50051", "127.0.0.1:50052")
prefill, decode = grpc.insecure_channel(prefill_address), grpc.insecure_channel(decode_address)

reserve = memory_pb.ReserveKvRequest(prompt_tokens=len(PROMPT), max_new_tokens=8)
lease = memory_grpc.MemoryServiceStub(decode).ReserveKv(reserve).lease
print(f"lease {lease.lease_id}: blocks {list(lease.block_ids)} of /dev/shm/{lease.segment.name}")

compute = prefill_pb.PrefillRequest(token_ids=PROMPT, lease=lease)
for event in prefill_grpc.PrefillServiceStub(prefill).Prefill(compute):
    if event.HasField("done"):
        print(f"prefilled {event.done.computed_tokens} tokens")

generate = decode_pb.DecodeServiceGenerateRequest(
    lease_id=lease.lease_id,
    epoch=lease.segment.epoch,
    prompt_token_ids=PROMPT,
    sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
)
for step in decode_grpc.DecodeServiceStub(decode).Generate(generate):
    print([token.token_id for token in step.tokens], end=" ")
print()
