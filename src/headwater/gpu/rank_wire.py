"""What the prefill process and its ranks tell each other, over a socket pair.

Owns the form of a message: two little-endian UINT32, the bytes of its text and of its payload, then
both. The text is JSON, an object whose `what` says what is meant; the payload is numbers as they
lie in memory. File descriptors travel beside the first byte.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from headwater.errors import UnavailableError
from headwater.kv.layout import KvKind, KvLayout
from headwater.model.batch import Batch, SequenceChunk
from headwater.shm import SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Message:
    """A message received; whoever takes the file descriptors closes them."""

    fields: dict[str, Any]
    payload: bytes
    file_descriptors: tuple[int, ...]

    @property
    def what(self) -> str:
        """What is meant."""
        return str(self.fields["what"])


def send(
    peer: socket.socket,
    fields: dict[str, Any],
    payload: bytes = b"",
    file_descriptors: Sequence[int] = (),
) -> None:
    """Sends one message. Raises UnavailableError when nobody is there."""
    text = json.dumps(fields).encode()
    head = _HEAD.pack(len(text), len(payload))
    try:
        if file_descriptors:
            socket.send_fds(peer, [head], list(file_descriptors))
            peer.sendall(text + payload)
        else:
            peer.sendall(head + text + payload)
    except OSError as failure:
        raise UnavailableError(f"the other end is gone: {failure}") from failure


def receive(peer: socket.socket) -> Message:
    """Waits for a message. Raises UnavailableError when the other end is gone, or too late."""
    try:
        head, found, _, _ = socket.recv_fds(peer, _HEAD.size, 4)
        file_descriptors = tuple(found)
        try:
            head += _exactly(peer, _HEAD.size - len(head)) if head else b""
            if not head:
                raise UnavailableError("the other end has closed")
            num_text, num_payload = _HEAD.unpack(head)
            fields = json.loads(_exactly(peer, num_text))
            return Message(fields, _exactly(peer, num_payload), file_descriptors)
        except BaseException:
            for descriptor in file_descriptors:
                os.close(descriptor)
            raise
    except OSError as failure:
        raise UnavailableError(f"the other end is gone: {failure}") from failure


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = peer.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise UnavailableError("the other end has closed in the middle of a message")
        parts += part
    return bytes(parts)


def handle_fields(handle: SegmentHandle) -> dict[str, Any]:
    """A segment's handle for JSON."""
    return asdict(handle) | {"digest": handle.digest.hex()}


def handle_of(fields: dict[str, Any]) -> SegmentHandle:
    """The handle again."""
    return SegmentHandle(**(fields | {"digest": bytes.fromhex(fields["digest"])}))


def layout_fields(layout: KvLayout) -> dict[str, Any]:
    """A pool's layout for JSON."""
    return asdict(layout) | {"kind": layout.kind.value}


def layout_of(fields: dict[str, Any]) -> KvLayout:
    """The layout again."""
    return KvLayout(**(fields | {"kind": KvKind(fields["kind"])}))


def batch_fields(batch: Batch) -> tuple[list[tuple[int, int, int]], bytes]:
    """(start, new tokens, blocks) of each sequence; and all their tokens, then all their blocks."""
    spans = [(span.start, span.num_new, len(span.block_ids)) for span in batch.spans]
    blocks = torch.cat([span.block_ids for span in batch.spans])
    return spans, _bytes_of(torch.cat((batch.token_ids, blocks)))


def batch_of(spans: Sequence[Sequence[int]], payload: bytes, block_tokens: int) -> Batch:
    """The batch again."""
    numbers = torch.frombuffer(bytearray(payload), dtype=torch.int64).tolist()
    first_block = sum(num_new for _, num_new, _ in spans)
    first_token, chunks = 0, []
    for start, num_new, num_blocks in spans:
        tokens = numbers[first_token : first_token + num_new]
        chunks.append(SequenceChunk(tokens, start, numbers[first_block : first_block + num_blocks]))
        first_token += num_new
        first_block += num_blocks
    return Batch.build(chunks, block_tokens)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def states_payload(states: Tensor) -> bytes:
    """FP32 [n, hidden] as a payload."""
    return _bytes_of(states.cpu())


def states_of(payload: bytes, hidden_size: int) -> Tensor:
    """FP32 [n, hidden] again."""
    return torch.frombuffer(bytearray(payload), dtype=torch.float32).view(-1, hidden_size)
