"""The wire forms: round trips, the stored baseline of the protos, and their documentation."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from headwater.errors import InvalidRequestError
from headwater.generation import FinishReason, SamplingParams, Timings, Token, Usage
from headwater.kv.layout import LAYOUT_VERSION, KvKind, KvLayout
from headwater.kv.lease import KvLease
from headwater.kv.words import lease_word
from headwater.shm import SegmentHandle
from headwater.v1 import generation_pb2
from headwater.weights.tensors import DType, TensorEntry
from headwater.wire import generation as wire_generation
from headwater.wire.kv import kv_lease_from_pb, kv_lease_to_pb
from headwater.wire.weights import MAX_BATCH_TENSORS, tensor_batches, tensor_entry_from_pb

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).resolve().parents[1] / "data" / "v1_baseline.binpb"

LEASE = KvLease(
    lease_id=3,
    segment=SegmentHandle("hw.kv.1", 8192, 17, LAYOUT_VERSION, b"d" * 32, 42),
    layout=KvLayout(KvKind.MLA, 2, 8, 16, 1, 576, 4, 64),
    slot=2,
    generation=lease_word(9, 2, (5, 1), 16),
    block_ids=(5, 1),
    cached_tokens=16,
    ttl_ms=1000,
)


def test_sampling_round_trip() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        seed=2**63,
        logit_bias={7: -1.5},
        logprobs=0,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        stop=("x",),
        include_stop=True,
    )
    assert wire_generation.sampling_from_pb(wire_generation.sampling_to_pb(params)) == params


def test_absent_sampling_fields_mean_the_defaults() -> None:
    assert wire_generation.sampling_from_pb(generation_pb2.SamplingParams()) == SamplingParams()


def test_explicit_zeros_are_not_defaults() -> None:
    message = generation_pb2.SamplingParams(temperature=0.0)
    assert wire_generation.sampling_from_pb(message).temperature == 0.0
    with pytest.raises(InvalidRequestError, match="top_p"):
        wire_generation.sampling_from_pb(generation_pb2.SamplingParams(top_p=0.0))


def test_small_messages_round_trip() -> None:
    token = Token(7, -0.5, ((7, -0.5), (8, -1.5)))
    assert wire_generation.token_from_pb(wire_generation.token_to_pb(token)) == token
    assert wire_generation.token_from_pb(wire_generation.token_to_pb(Token(7))) == Token(7)
    for reason in FinishReason:
        to_pb = wire_generation.finish_reason_to_pb(reason)
        assert wire_generation.finish_reason_from_pb(to_pb) is reason
    usage, timings = Usage(1, 2, 3), Timings(1, 2, 3, 4, 5, 6)
    assert wire_generation.usage_from_pb(wire_generation.usage_to_pb(usage)) == usage
    assert wire_generation.timings_from_pb(wire_generation.timings_to_pb(timings)) == timings


def test_lease_round_trip() -> None:
    assert kv_lease_from_pb(kv_lease_to_pb(LEASE)) == LEASE


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("slot", 4),
        ("block_ids", [8]),
        ("layout.num_layers", 0),
        ("layout.kind", 0),
        ("segment.layout_version", 1),
        ("generation", 9),
    ],
)
def test_a_lease_outside_its_pool_is_refused(path: str, value: int | list[int]) -> None:
    message = kv_lease_to_pb(LEASE)
    target = message
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(value, list):
        getattr(target, name)[:] = value
    else:
        setattr(target, name, value)
    with pytest.raises(InvalidRequestError, match=re.escape(f"lease.{path}")):
        kv_lease_from_pb(message)


def test_a_long_manifest_travels_in_bounded_messages() -> None:
    entries = [TensorEntry(f"t{i}", DType.F8_E4M3, (2, 3), i * 4096) for i in range(10_000)]
    batches = list(tensor_batches(entries))
    assert max(len(batch.tensors) for batch in batches) <= MAX_BATCH_TENSORS
    assert [tensor_entry_from_pb(t) for batch in batches for t in batch.tensors] == entries


def compiled() -> descriptor_pb2.FileDescriptorSet:
    data = resources.files("headwater.v1").joinpath("descriptors.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data)


def facts(files: descriptor_pb2.FileDescriptorSet) -> dict[str, object]:
    """What a peer of another version depends on: names, numbers, types, directions."""
    found: dict[str, object] = {}

    def add_message(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            name = f"{prefix}.{message.name}.{field.name}"
            found[name] = (
                field.number,
                field.type,
                field.label,
                field.type_name,
                field.proto3_optional,
                field.HasField("oneof_index"),
            )
        for nested in message.nested_type:
            add_message(f"{prefix}.{message.name}", nested)

    for file in files.file:
        for message in file.message_type:
            add_message(file.package, message)
        for enum in file.enum_type:
            for value in enum.value:
                found[f"{file.package}.{enum.name}.{value.name}"] = value.number
        for service in file.service:
            for method in service.method:
                found[f"{file.package}.{service.name}/{method.name}"] = (
                    method.input_type,
                    method.output_type,
                    method.client_streaming,
                    method.server_streaming,
                )
    return found


def test_nothing_of_the_baseline_is_changed_or_gone() -> None:
    """Additions are free; a change here breaks clients and needs a new package version.

    After an addition renew the baseline: `python -m tests.unit.test_wire`.
    """
    baseline = facts(descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes()))
    now = facts(compiled())
    assert {name: now.get(name) for name in baseline} == baseline


@pytest.mark.parametrize("change", ["remove", "renumber", "retype"])
def test_the_comparison_sees_a_breaking_change(change: str) -> None:
    files = compiled()
    file = next(f for f in files.file if f.name.endswith("generation.proto"))
    message = next(m for m in file.message_type if m.name == "SamplingParams")
    if change == "remove":
        del message.field[0]
    elif change == "renumber":
        message.field[0].number = 99
    else:
        message.field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    before, after = facts(compiled()), facts(files)
    assert {name: after.get(name) for name in before} != before


def test_enums_start_with_unspecified() -> None:
    for file in compiled().file:
        for enum in file.enum_type:
            assert enum.value[0].number == 0
            assert enum.value[0].name.endswith("_UNSPECIFIED")


def test_every_rpc_has_its_own_request_and_response() -> None:
    used = [
        name
        for file in compiled().file
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    ]
    assert len(set(used)) == len(used)


def test_every_message_field_and_rpc_is_documented() -> None:
    """Each declaration line of the protos follows a comment."""
    declaration = re.compile(r"^\s*(rpc |optional |repeated |map<|[A-Za-z0-9_.]+ \w+ = \d+;)")
    for path in sorted((ROOT / "proto/headwater/v1").glob("*.proto")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if declaration.match(line) and not line.strip().endswith("_UNSPECIFIED = 0;"):
                previous = lines[number - 1].strip()
                is_enum_value = re.match(r"^\s*[A-Z0-9_]+ = \d+;", line)
                assert previous.startswith("//") or is_enum_value, f"{path.name}:{number + 1}"


if __name__ == "__main__":
    BASELINE.write_bytes(compiled().SerializeToString())
