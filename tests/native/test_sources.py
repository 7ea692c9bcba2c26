"""What the C++ sources must not do, whatever a compiler makes of it."""

from __future__ import annotations

from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"


def test_lines_are_fetched_by_instructions_that_no_compiler_drops() -> None:
    # GCC 12 takes a function that only prefetches for one that does nothing; FP8 on AMX then read
    # memory at two thirds of its speed, and every result was right.
    sources = [*NATIVE.rglob("*.hpp"), *NATIVE.rglob("*.cpp")]
    assert NATIVE / "src" / "fetch.hpp" in sources
    builtins = [
        f"{source.relative_to(NATIVE)}:{number}"
        for source in sources
        if source.name != "fetch.hpp"
        for number, line in enumerate(source.read_text().splitlines(), 1)
        if "_mm_prefetch(" in line or "__builtin_prefetch(" in line
    ]
    assert builtins == []
