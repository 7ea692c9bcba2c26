"""A short soak; `--soak-seconds 60` makes it longer, `python -m benchmarks.soak` much longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.soak import SETTINGS, Soak

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.integration.stack import Stack

SEED = 5


async def test_soak(make_stack: Callable[..., Stack], request: pytest.FixtureRequest) -> None:
    stack = make_stack(*SETTINGS, "router.prompt_path=auto")
    stack.start()
    print(f"seed {SEED}")
    soak = Soak(stack, SEED)
    seconds = float(request.config.getoption("--soak-seconds"))
    await soak.run(seconds, round_seconds=seconds / 6)
    for (kind, how), count in sorted(soak.outcomes.items()):
        print(f"{kind:12} {how:16} {count}")
    assert soak.errors == []
    # Everything happened: it was served, refused for its content, too late, and too much.
    for outcome in (
        ("answer", "done"),
        ("hang up", "left"),
        ("bad", "INVALID_REQUEST"),
        ("bad", "PROMPT_TOO_LONG"),
        ("deadline", "DEADLINE"),
        ("answer", "QUEUE_FULL"),
        ("structured", "done"),
    ):
        assert soak.outcomes[outcome], outcome
    for name in stack.processes:
        growth = soak.growth(name)
        print(name, growth)
        # A round in which one more connection is still closing is no leak.
        assert abs(growth["file_descriptors"]) <= 4
        assert abs(growth["threads"]) <= 1
        assert growth["private_kib"] < 16 * 1024
        assert "Traceback" not in stack.log(name), stack.log(name)
