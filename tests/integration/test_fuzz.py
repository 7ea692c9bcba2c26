"""Ten seconds of attacks on every service; `python -m benchmarks.fuzz --minutes 5` for more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.fuzz import SETTINGS, Fuzz

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.stack import Stack

SEED = 11
SECONDS = 10.0


async def test_fuzz(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(*SETTINGS)
    stack.start()
    print(f"seed {SEED}")
    fuzz = Fuzz(stack, SEED)
    await fuzz.run(SECONDS, round_seconds=SECONDS / 4)
    for (kind, how), count in sorted(fuzz.outcomes.items()):
        print(f"{kind:12} {how:40} {count}")
    assert fuzz.complaints == []
    # All of it happened, and was seen through.
    for outcome in (
        ("good", "OK"),
        ("message", "INVALID_ARGUMENT"),
        ("broken", "INVALID_ARGUMENT"),
        ("fields", "OK"),
        ("lease", "NOT_FOUND"),
        ("unknown", "UNIMPLEMENTED"),
    ):
        assert fuzz.outcomes[outcome], outcome
    for name in stack.processes:
        growth = fuzz.growth(name)
        print(name, growth)
        assert abs(growth["file_descriptors"]) <= 4
        assert abs(growth["threads"]) <= 2
        # malloc keeps what a few messages of 16 MiB took; what grows is for the long run to tell.
        assert growth["private_kib"] < 64 * 1024
