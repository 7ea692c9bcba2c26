"""Segments within one process: creating, attaching, refusing, sealing, views, locks, reaping."""

from __future__ import annotations

import gc
import os
import struct
from pathlib import Path

import pytest

from headwater import shm
from headwater.errors import (
    SegmentError,
    SegmentExistsError,
    SegmentNotFoundError,
    SharedMemoryFullError,
)
from headwater.shm import HEADER_BYTES, Lifetime, Segment, SegmentKind, SegmentState

PAYLOAD_BYTES = 3 * 4096
DIGEST = bytes(range(32))


def make(name: str, **options: object) -> Segment:
    fields: dict[str, object] = {
        "kind": SegmentKind.KV,
        "lifetime": Lifetime.BOUND,
        "epoch": 7,
        "layout_version": 2,
        "digest": DIGEST,
    }
    return Segment.create(name, PAYLOAD_BYTES, **(fields | options))  # type: ignore[arg-type]


def path_of(name: str) -> Path:
    return Path("/dev/shm") / name


def patch_header(name: str, offset: int, data: bytes) -> None:
    with path_of(name).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_new_segment_is_filling_zeroed_owned_and_private(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as segment:
        assert segment.state is SegmentState.FILLING
        assert (segment.is_owner, segment.is_writable, segment.is_sealed) == (True, True, False)
        assert (segment.kind, segment.lifetime) == (SegmentKind.KV, Lifetime.BOUND)
        assert segment.payload_bytes == PAYLOAD_BYTES
        assert bytes(memoryview(segment.view(0, PAYLOAD_BYTES))) == bytes(PAYLOAD_BYTES)
        assert path_of(segment.name).stat().st_mode & 0o7777 == 0o600
        handle = segment.handle
        assert handle.total_bytes == HEADER_BYTES + PAYLOAD_BYTES
        assert (handle.epoch, handle.layout_version, handle.digest) == (7, 2, DIGEST)
        assert handle.owner_pid == os.getpid()


def test_the_header_lies_as_documented(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as segment:
        header = path_of(segment.name).read_bytes()[:HEADER_BYTES]
        fields = struct.unpack_from("<8s6I2Q2IQ32s", header)
        assert fields[:7] == (b"HEADWATR", 1, 2, 1, 1, 0, 2)
        assert fields[7:9] == (HEADER_BYTES + PAYLOAD_BYTES, 7)
        assert fields[9:11] == (os.geteuid(), os.getpid())
        assert fields[12] == DIGEST
        assert not any(header[96:])


def test_what_one_writes_the_other_reads(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as owner:
        owner.mark_ready()
        with Segment.attach_handle(owner.handle, writable=True) as other:
            memoryview(other.view(4096, 4))[:] = b"abcd"
            assert bytes(memoryview(owner.view(4096, 4))) == b"abcd"
            other.store_u64(8, 1 << 63)
            assert owner.load_u64(8) == 1 << 63
            assert not other.is_owner


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "x" * 201, "a\0b"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(SegmentError, match="check 'name' failed"):
        make(name)
    with pytest.raises(SegmentError, match="check 'name' failed"):
        Segment.attach(name)


def test_creating_twice_is_refused_and_harms_nothing(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as first:
        memoryview(first.view(0, 2))[:] = b"ok"
        with pytest.raises(SegmentExistsError, match="exists already"):
            make(first.name)
        first.mark_ready()
        with Segment.attach(first.name) as other:
            assert bytes(memoryview(other.view(0, 2))) == b"ok"


def test_attaching_to_nothing_says_so(shm_prefix: str) -> None:
    with pytest.raises(SegmentNotFoundError, match="does not exist"):
        Segment.attach(f"{shm_prefix}.none")


def test_filling_and_poisoned_segments_are_refused_by_name(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as owner:
        with pytest.raises(SegmentError, match="expected ready, found filling"):
            Segment.attach(owner.name)
        owner.mark_ready()
        owner.poison()
        with pytest.raises(SegmentError, match="expected ready, found poisoned"):
            Segment.attach(owner.name)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"total_bytes": 5}, "check 'total bytes' failed: expected 5, found 16384"),
        ({"epoch": 6}, "check 'epoch' failed: expected 6, found 7"),
        ({"layout_version": 3}, "check 'layout version' failed: expected 3, found 2"),
        ({"digest": bytes(32)}, "check 'digest' failed: expected 0000.*, found 0001"),
        ({"digest": b"short"}, "digest: expected 0 or 32 bytes, got 5"),
    ],
)
def test_a_stale_handle_is_refused_with_both_values(
    shm_prefix: str, expected: dict[str, object], message: str
) -> None:
    with make(f"{shm_prefix}.a") as owner:
        owner.mark_ready()
        with pytest.raises(SegmentError, match=message):
            Segment.attach(owner.name, **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"NOTHEADW", "check 'magic' failed"),
        (8, struct.pack("<I", 9), "check 'header version' failed: expected 1, found 9"),
        (12, struct.pack("<I", 9), "check 'kind and lifetime' failed"),
        (20, struct.pack("<I", 77), "expected ready, found foreign"),
        (32, struct.pack("<Q", 1 << 40), "check 'size' failed: expected 1099511627776 bytes"),
    ],
)
def test_a_foreign_header_is_refused(
    shm_prefix: str, offset: int, data: bytes, message: str
) -> None:
    with make(f"{shm_prefix}.a") as owner:
        owner.mark_ready()
        original = path_of(owner.name).read_bytes()[offset : offset + len(data)]
        patch_header(owner.name, offset, data)
        with pytest.raises(SegmentError, match=message):
            Segment.attach(owner.name)
        patch_header(owner.name, offset, original)


def test_other_files_are_refused_listed_as_foreign_and_never_removed(shm_prefix: str) -> None:
    def link(path: Path) -> None:
        path.symlink_to("/etc/passwd")

    def loose_mode(path: Path) -> None:
        path.write_bytes(bytes(8192))
        path.chmod(0o644)

    def short(path: Path) -> None:
        path.write_bytes(b"short")
        path.chmod(0o600)

    for make_file, message in (
        (link, "symbolic link"),
        (loose_mode, "check 'mode' failed: expected 0600, found 0644"),
        (short, "check 'size' failed: expected at least 4096 bytes, found 5"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
    ):
        path = path_of(f"{shm_prefix}.foreign")
        make_file(path)
        try:
            with pytest.raises(SegmentError, match=message):
                Segment.attach(path.name)
            (info,) = shm.list_segments(f"{shm_prefix}.")
            assert (info.state, info.kind, info.total_bytes) == (SegmentState.FOREIGN, None, 0)
            assert info.problem
            assert shm.reap(f"{shm_prefix}.", release_weights=True) == []
            assert os.path.lexists(path)
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_too_little_shared_memory_names_the_shortfall_and_the_remedy(shm_prefix: str) -> None:
    with pytest.raises(SharedMemoryFullError, match=r"needs \d+ bytes, has \d+ .* short.*shm-size"):
        Segment.create(f"{shm_prefix}.a", 1 << 50, kind=SegmentKind.KV, lifetime=Lifetime.BOUND)
    assert shm.list_segments(f"{shm_prefix}.") == []


def test_sealing_makes_everybody_read_only(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as owner:
        memoryview(owner.view(0, 2))[:] = b"ok"
        owner.seal()
        assert (owner.is_sealed, owner.is_writable) == (True, False)
        assert memoryview(owner.view(0, 2)).readonly
        with pytest.raises(SegmentError, match="read-only"):
            owner.store_u64(0, 1)
        with pytest.raises(SegmentError, match="read-only"):
            owner.populate(0, 1)
        with pytest.raises(SegmentError, match="check 'sealed' failed"):
            Segment.attach(owner.name, writable=True)
        with Segment.attach(owner.name) as other:
            assert other.is_sealed
            assert bytes(memoryview(other.view(0, 2))) == b"ok"
            with pytest.raises(TypeError):
                memoryview(other.view(0, 2))[0] = 1


def test_sealing_waits_for_writable_views(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as owner:
        view = owner.view(0, 8)
        with pytest.raises(SegmentError, match=r"1 writable view\(s\)"):
            owner.seal()
        del view
        gc.collect()
        owner.seal()


def test_only_the_owner_may_seal_mark_poison_unlink_or_release(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as owner:
        owner.mark_ready()
        with Segment.attach(owner.name, writable=True) as other:
            for action in (
                other.seal,
                other.mark_ready,
                other.poison,
                other.unlink,
                other.release_ownership,
            ):
                with pytest.raises(SegmentError, match="only its owner may"):
                    action()


def test_ownership_moves_by_a_named_call(shm_prefix: str) -> None:
    owner = make(f"{shm_prefix}.a", lifetime=Lifetime.PERSISTENT)
    owner.seal()
    with Segment.attach(owner.name) as other:
        with pytest.raises(SegmentError, match=f"owned by process {os.getpid()}, which is alive"):
            other.adopt_ownership()
        owner.release_ownership()
        other.adopt_ownership()
        assert (owner.is_owner, other.is_owner) == (False, True)
        owner.close()
        other.unlink()
        other.unlink()  # once is enough, and a second call harms nobody
        with pytest.raises(SegmentNotFoundError):
            Segment.attach(other.name)


def test_a_view_keeps_its_memory_after_close(shm_prefix: str) -> None:
    segment = make(f"{shm_prefix}.a")
    view = memoryview(segment.view(0, 4))
    view[:] = b"live"
    segment.close()
    segment.close()
    assert segment.is_closed
    del segment
    gc.collect()
    assert bytes(view) == b"live"
    assert not path_of(f"{shm_prefix}.a").exists()  # bound, and its owner let go


def test_a_view_counts_as_attached_until_it_dies(shm_prefix: str) -> None:
    owner = make(f"{shm_prefix}.a", lifetime=Lifetime.PERSISTENT)
    owner.seal()
    view = owner.view(0, 4)
    owner.close()
    assert shm.reap(f"{shm_prefix}.", release_weights=True) == []
    del view
    gc.collect()
    assert shm.reap(f"{shm_prefix}.", release_weights=True) == [f"{shm_prefix}.a"]


def test_a_closed_segment_says_so(shm_prefix: str) -> None:
    segment = make(f"{shm_prefix}.a")
    segment.close()
    for use in (lambda: segment.view(0, 1), lambda: segment.load_u64(0), lambda: segment.state):
        with pytest.raises(SegmentError, match="it is closed"):
            use()


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, PAYLOAD_BYTES + 1), (PAYLOAD_BYTES, 1), (2**64 - 1, 1), (1, 2**64 - 1)],
)
def test_views_stay_inside_the_payload(shm_prefix: str, offset: int, num_bytes: int) -> None:
    with make(f"{shm_prefix}.a") as segment, pytest.raises(SegmentError, match="outside its pay"):
        segment.view(offset, num_bytes)


def test_words_are_aligned_and_inside_the_payload(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as segment:
        segment.populate(0, PAYLOAD_BYTES)
        segment.store_u64(PAYLOAD_BYTES - 8, 5)
        with pytest.raises(SegmentError, match="not a multiple of 8"):
            segment.load_u64(4)
        with pytest.raises(SegmentError, match="outside its payload"):
            segment.store_u64(PAYLOAD_BYTES, 0)


def test_a_slot_has_one_writer(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.a") as owner:
        owner.mark_ready()
        writer = Segment.attach(owner.name, writable=True)
        assert writer.try_lock_slot(3)
        assert not writer.try_lock_slot(3)
        assert not owner.try_lock_slot(3)
        assert owner.is_slot_locked(3)
        assert writer.is_slot_locked(3)
        assert not owner.is_slot_locked(4)
        with pytest.raises(SegmentError, match="slot 3 is not held here"):
            owner.unlock_slot(3)
        writer.unlock_slot(3)
        assert owner.try_lock_slot(3)
        owner.unlock_slot(3)
        assert writer.try_lock_slot(3)
        writer.close()
        assert not owner.is_slot_locked(3)


def test_listing_shows_owner_and_attachers(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.b") as owner, make(f"{shm_prefix}.a", lifetime=Lifetime.PERSISTENT):
        owner.mark_ready()
        first, second = shm.list_segments(f"{shm_prefix}.")
        assert (first.name, first.state) == (f"{shm_prefix}.a", SegmentState.FILLING)
        assert (second.name, second.state) == (f"{shm_prefix}.b", SegmentState.READY)
        assert (second.is_owner_alive, second.is_attached) == (True, True)
        assert (second.epoch, second.layout_version, second.digest) == (7, 2, DIGEST)
        assert second.created_unix_nano > 0


def test_reaping_takes_only_what_nobody_owns(shm_prefix: str) -> None:
    prefix = f"{shm_prefix}."
    with make(f"{prefix}alive") as alive:
        alive.mark_ready()
        ready = make(f"{prefix}ready", lifetime=Lifetime.PERSISTENT)
        ready.seal()
        ready.close()
        for name, spoil in (("filling", Segment.close), ("poisoned", Segment.poison)):
            segment = make(f"{prefix}{name}", lifetime=Lifetime.PERSISTENT)
            spoil(segment)
            segment.close()
        assert shm.reap(prefix) == [f"{prefix}filling", f"{prefix}poisoned"]
        with Segment.attach(f"{prefix}ready"):
            assert shm.reap(prefix, release_weights=True) == []
        assert shm.reap(prefix, release_weights=True) == [f"{prefix}ready"]
        assert [info.name for info in shm.list_segments(prefix)] == [alive.name]
