"""Segments across processes that are killed without warning."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headwater import shm
from headwater.errors import SegmentError
from headwater.shm import Lifetime, Segment, SegmentKind

PRELUDE = """
import sys
from headwater.shm import Lifetime, Segment, SegmentKind
name = sys.argv[1]
def make(lifetime):
    return Segment.create(name, 1 << 20, kind=SegmentKind.KV, lifetime=lifetime)
"""
WAIT = """
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(code: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has run `code` and waits; killed at the end unless it is dead already."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code + WAIT, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def names(prefix: str) -> list[str]:
    return [info.name for info in shm.list_segments(f"{prefix}.")]


def test_a_dead_owner_leaves_nothing_bound(shm_prefix: str) -> None:
    name = f"{shm_prefix}.kv"
    with running("s = make(Lifetime.BOUND); s.mark_ready()", name) as owner:
        attached = Segment.attach(name)
        assert shm.reap(f"{shm_prefix}.") == []
        assert names(shm_prefix) == [name]
        kill(owner)
        (info,) = shm.list_segments(f"{shm_prefix}.")
        assert (info.is_owner_alive, info.is_attached) == (False, True)
        assert shm.reap(f"{shm_prefix}.") == [name]
        assert names(shm_prefix) == []
        assert attached.load_u64(0) == 0  # still mapped
        attached.close()


def test_persistent_segments_outlive_their_owner_and_find_a_new_one(shm_prefix: str) -> None:
    name = f"{shm_prefix}.weights"
    code = "s = make(Lifetime.PERSISTENT); s.store_u64(0, 42); s.seal()"
    with running(code, name) as owner:
        with Segment.attach(name) as early, pytest.raises(SegmentError, match="which is alive"):
            early.adopt_ownership()
        kill(owner)
    assert shm.reap(f"{shm_prefix}.") == []
    with Segment.attach(name) as heir:
        heir.adopt_ownership()
        assert heir.load_u64(0) == 42
        assert shm.list_segments(f"{shm_prefix}.")[0].is_owner_alive
    assert shm.reap(f"{shm_prefix}.", release_weights=True) == [name]


def test_an_unfinished_segment_of_a_dead_owner_is_reaped(shm_prefix: str) -> None:
    name = f"{shm_prefix}.weights"
    with running("s = make(Lifetime.PERSISTENT)", name) as owner:
        assert shm.reap(f"{shm_prefix}.") == []
        kill(owner)
    assert shm.reap(f"{shm_prefix}.") == [name]


def test_an_attacher_keeps_persistent_weights_from_release(shm_prefix: str) -> None:
    name = f"{shm_prefix}.weights"
    with Segment.create(
        name, 4096, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.PERSISTENT
    ) as owner:
        owner.seal()
    with running("s = Segment.attach(name)", name) as attacher:
        assert shm.reap(f"{shm_prefix}.", release_weights=True) == []
        kill(attacher)
    assert shm.reap(f"{shm_prefix}.", release_weights=True) == [name]


def test_the_kernel_frees_a_dead_writers_slot(shm_prefix: str) -> None:
    name = f"{shm_prefix}.kv"
    with Segment.create(name, 4096, kind=SegmentKind.KV, lifetime=Lifetime.BOUND) as pool:
        pool.mark_ready()
        code = "s = Segment.attach(name, writable=True); assert s.try_lock_slot(5)"
        with running(code, name) as writer:
            assert pool.is_slot_locked(5)
            assert not pool.try_lock_slot(5)
            kill(writer)
            assert not pool.is_slot_locked(5)
            assert pool.try_lock_slot(5)


def test_many_racing_reapers_remove_each_segment_once(shm_prefix: str) -> None:
    for i in range(20):
        segment = Segment.create(
            f"{shm_prefix}.{i:02}", 4096, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.PERSISTENT
        )
        segment.close()  # never became ready
    code = "from headwater.shm import reap\nsys.stdin.readline()\nprint(len(reap(sys.argv[1])))"
    reapers = [
        subprocess.Popen(
            [sys.executable, "-c", "import sys\n" + code, f"{shm_prefix}."],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for reaper in reapers:
        assert reaper.stdin is not None
        reaper.stdin.write("go\n")
        reaper.stdin.flush()
    outputs = [reaper.communicate(timeout=60)[0] for reaper in reapers]
    assert sum(int(output) for output in outputs) == 20
    assert names(shm_prefix) == []


def test_a_forked_child_does_not_act_as_the_owner(shm_prefix: str) -> None:
    code = """
import os
s = make(Lifetime.BOUND); s.mark_ready()
child = os.fork()
if child == 0:
    s.close()
    os._exit(0 if not s.is_owner else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    name = f"{shm_prefix}.kv"
    with running(code, name):
        assert names(shm_prefix) == [name]
    assert shm.reap(f"{shm_prefix}.") == [name]
