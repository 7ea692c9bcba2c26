"""Messages between the prefill process and its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from headwater.errors import UnavailableError
from headwater.gpu import rank_wire
from headwater.kv.layout import KvKind, KvLayout
from headwater.model.batch import Batch, SequenceChunk
from headwater.shm import SegmentHandle


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_text_payload_and_file_descriptors_arrive(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    rank_wire.send(ours, {"what": "pool", "number": 3}, b"\0\1\2", (write,))
    rank_wire.send(ours, {"what": "layer"})
    os.close(write)
    first, second = rank_wire.receive(theirs), rank_wire.receive(theirs)
    assert (first.what, first.fields["number"], first.payload) == ("pool", 3, b"\0\1\2")
    assert (second.what, second.payload, second.file_descriptors) == ("layer", b"", ())
    (duplicate,) = first.file_descriptors
    os.write(duplicate, b"x")
    assert os.read(read, 1) == b"x"
    os.close(duplicate)
    os.close(read)


@pytest.mark.parametrize("cut", [0, 3, 8, 12])
def test_an_end_that_closes_early_is_told(
    pair: tuple[socket.socket, socket.socket], cut: int
) -> None:
    ours, theirs = pair
    whole = rank_wire._HEAD.pack(20, 0) + b'{"what": "layer"}   '
    ours.sendall(whole[:cut])
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(UnavailableError, match="the other end has closed"):
        rank_wire.receive(theirs)
    with pytest.raises(UnavailableError, match="the other end is gone"):
        rank_wire.send(ours, {"what": "layer"})


def test_batches_handles_and_layouts_stay_what_they_are() -> None:
    chunks = [SequenceChunk([5, 6, 7], 4, (9, 2)), SequenceChunk([1], 0, (30,))]
    batch = Batch.build(chunks, 4)
    spans, payload = rank_wire.batch_fields(batch)
    again = rank_wire.batch_of(spans, payload, 4)
    for name in ("token_ids", "positions", "blocks", "offsets", "last_rows"):
        assert torch.equal(getattr(again, name), getattr(batch, name))
    handle = SegmentHandle("a", 8192, 7, 2, b"\1" * 32, 12)
    assert rank_wire.handle_of(rank_wire.handle_fields(handle)) == handle
    layout = KvLayout(KvKind.MLA, 2, 3, 4, 1, 576, 6, 64)
    assert rank_wire.layout_of(rank_wire.layout_fields(layout)) == layout
    states = torch.randn(3, 64)
    assert torch.equal(rank_wire.states_of(rank_wire.states_payload(states), 64), states)
