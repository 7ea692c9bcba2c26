"""A live stack of real processes around the tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conftest import unique_prefix
from tests.integration.router_rig import Rig, running_rig
from tests.integration.stack import Stack
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context of 4096 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("roomy-model"), context=4096)


@pytest.fixture
def make_stack(tiny_model: Path, shm_prefix: str, tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Makes stacks, not yet started, that are stopped at the end of the test."""
    made: list[Stack] = []

    def make(*settings: str, model: Path = tiny_model) -> Stack:
        stack = Stack(model, shm_prefix, tmp_path, list(settings))
        made.append(stack)
        return stack

    yield make
    for stack in made:
        stack.stop()


@pytest.fixture
def stack(make_stack: Callable[..., Stack]) -> Stack:
    """A running stack of the tiny model."""
    stack = make_stack()
    stack.start()
    return stack


@pytest.fixture(scope="module")
def shared_stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A running stack that all tests of a module share: for tests that must not disturb it."""
    with unique_prefix() as prefix:
        stack = Stack(tiny_model, prefix, tmp_path_factory.mktemp("shared-stack"), [])
        stack.start()
        yield stack
        stack.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A router with scripted engines."""
    async with running_rig() as running:
        yield running
