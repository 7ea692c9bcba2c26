"""A segment of another user is refused, whatever its mode says."""

from __future__ import annotations

import os

import pytest

from headwater.errors import SegmentError
from headwater.shm import Segment, list_segments
from tests.unit.test_shm import make, path_of

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_segment_of_another_user_is_refused(shm_prefix: str) -> None:
    with make(f"{shm_prefix}.stolen") as owner:
        path = path_of(owner.name)
        os.chown(path, NOBODY, NOBODY)
        try:
            with pytest.raises(SegmentError, match="check 'owner uid' failed: .* found 65534"):
                Segment.attach(owner.name)
            [listed] = list_segments(f"{shm_prefix}.")
            assert "owner uid" in listed.problem
        finally:
            os.chown(path, os.geteuid(), os.getegid())
