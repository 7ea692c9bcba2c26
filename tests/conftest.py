"""Fixtures for all tests: a watchdog, unique segment names, a tiny model."""

from __future__ import annotations

import faulthandler
import itertools
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from headwater.shm import list_segments, reap
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WATCHDOG_SECONDS = 300
_counter = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the soak test takes is for whoever runs it to say."""
    parser.addoption("--soak-seconds", type=float, default=12.0, help="length of the soak test")


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Ends the whole run, with the stacks of all threads, when a test hangs."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def unique_prefix() -> Iterator[str]:
    """A prefix for segment names that nobody else uses; afterwards nothing of it may be left."""
    prefix = f"hwtest-{os.getpid()}-{next(_counter)}"
    yield prefix
    reap(f"{prefix}.", release_weights=True)
    assert list_segments(f"{prefix}.") == []


@pytest.fixture
def shm_prefix() -> Iterator[str]:
    """A unique prefix for one test."""
    with unique_prefix() as prefix:
        yield prefix


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random checkpoint."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))
