"""Shared memory that is really too small: a 4 MiB /dev/shm in a mount namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

IN_SMALL_SHM = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" "$@"',
]

CREATE_TOO_MUCH = """
from headwater.errors import SharedMemoryFullError
from headwater.shm import Lifetime, Segment, SegmentKind
try:
    Segment.create("a", 8 << 20, kind=SegmentKind.KV, lifetime=Lifetime.BOUND)
except SharedMemoryFullError as error:
    assert "needs 8392704 bytes, has 4194304 available, 4198400 short" in str(error), error
    print("refused")
"""

POPULATE_TOO_MUCH = """
from headwater.errors import SharedMemoryFullError
from headwater.shm import Lifetime, Segment, SegmentKind
# Both fit while they are empty; memory is what runs out.
a = Segment.create("a", 3 << 20, kind=SegmentKind.KV, lifetime=Lifetime.BOUND)
b = Segment.create("b", 3 << 20, kind=SegmentKind.KV, lifetime=Lifetime.BOUND)
a.populate(0, 3 << 20)
try:
    b.populate(0, 3 << 20)
except SharedMemoryFullError as error:
    assert "segment 'b'" in str(error) and "enlarge" in str(error), error
    print("refused")
"""


def can_mount() -> bool:
    """Whether this user may make mount namespaces; most containers forbid it."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_SMALL_SHM, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
@pytest.mark.parametrize("code", [CREATE_TOO_MUCH, POPULATE_TOO_MUCH])
def test_a_full_shm_is_an_error_and_never_a_signal(code: str) -> None:
    done = subprocess.run(
        [*IN_SMALL_SHM, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
