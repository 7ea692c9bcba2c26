"""Fixtures for tests of the kernels."""

from __future__ import annotations

import pytest

from headwater.kernels import WorkerPool


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    """Two workers, so that work is really shared."""
    return WorkerPool(2)
