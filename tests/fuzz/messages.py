"""Random protobuf messages, and valid ones with something broken: as fields, and as bytes.

All draws come from the generator that the caller gives, so that a seed brings a message back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    from random import Random

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

# Nested messages deeper than this stay empty.
_MAX_DEPTH = 5
_LENGTHS = (0, 1, 1, 2, 3, 17, 300)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 101.0)
_TEXTS = (
    "",
    "a",
    "Hello",
    "\x00",
    "é" * 40,
    "\U0001f600",
    "../../etc/passwd",
    "/dev/shm",
    "%s%n{}",
    "x" * 129,
    "(((",
    '{"type": "object"}',
    '["a", "b"]',
    "[" * 2000,
    "x" * 5000,
)


def random_message(draw: Random, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message of any content that its type can hold."""
    message: Any = GetMessageClass(descriptor)()
    share = draw.choice((0.1, 0.5, 0.9))
    for field in descriptor.fields:
        if draw.random() < share:
            _set_field(draw, message, field, depth)
    return message  # type: ignore[no-any-return]


def mutate_fields(draw: Random, message: Message) -> None:
    """Changes, empties or sets one to three fields, at any depth."""
    for _ in range(draw.randrange(1, 4)):
        target: Any = message
        while True:
            nested = [value for field, value in target.ListFields() if _is_single_message(field)]
            if not nested or draw.random() < 0.4:
                break
            target = draw.choice(nested)
        fields = target.DESCRIPTOR.fields
        if not fields:
            continue
        field = draw.choice(fields)
        if draw.random() < 0.2:
            target.ClearField(field.name)
        else:
            _set_field(draw, target, field, 1)


def mutate_bytes(draw: Random, data: bytes) -> bytes:
    """The bytes with some flipped, cut out, doubled, put in or left off."""
    piece = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(piece) + 1)
        length = draw.randrange(1, 9)
        match draw.randrange(6):
            case 0 if piece:
                piece[at % len(piece)] ^= 1 << draw.randrange(8)
            case 1:
                del piece[at : at + length]
            case 2:
                piece[at:at] = piece[at : at + length]
            case 3:
                piece[at:at] = draw.randbytes(length)
            case 4:
                # A varint that goes on for too long, or says a length beyond the end.
                piece[at:at] = b"\xff" * length
            case _:
                del piece[at:]
    return bytes(piece)


def _is_single_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated


def _set_field(draw: Random, message: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and depth >= _MAX_DEPTH:
        return
    if not field.is_repeated:
        if field.message_type is None:
            setattr(message, field.name, _scalar(draw, field))
        else:
            nested = random_message(draw, field.message_type, depth + 1)
            getattr(message, field.name).CopyFrom(nested)
        return
    target = getattr(message, field.name)
    message.ClearField(field.name)
    for _ in range(draw.choice(_LENGTHS[: None if field.message_type is None else 5])):
        if field.message_type is None:
            target.append(_scalar(draw, field))
        elif not field.message_type.GetOptions().map_entry:
            target.add().CopyFrom(random_message(draw, field.message_type, depth + 1))
        else:
            key, value = field.message_type.fields
            if value.message_type is None:
                target[_scalar(draw, key)] = _scalar(draw, value)
            else:
                nested = random_message(draw, value.message_type, depth + 1)
                target[_scalar(draw, key)].CopyFrom(nested)


def _integer(draw: Random, low: int, high: int) -> int:
    near = (0, 1, 2, 3, 15, 16, 17, 255, 256, 257, 511, 512, 513, -1, low, high, high - 1, 1 << 31)
    value = draw.choice(near) if draw.random() < 0.8 else draw.randint(low, high)
    return min(max(value, low), high)


def _scalar(draw: Random, field: FieldDescriptor) -> Any:
    ranges = {
        FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
        # Open enums: numbers without a name are allowed on the wire.
        FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
    }
    if field.cpp_type in ranges:
        return _integer(draw, *ranges[field.cpp_type])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice(_LENGTHS))
        return draw.choice(_TEXTS)
    # What a float cannot hold becomes infinite by itself.
    return draw.choice(_FLOATS) if draw.random() < 0.8 else draw.uniform(-3.0, 3.0)
