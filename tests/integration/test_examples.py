"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.integration.stack import Stack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_generate(shared_stack: Stack) -> None:
    printed = run_example("generate.py", shared_stack.addresses["router"])
    assert "Usage(prompt_tokens=24" in printed


def test_reserve_prefill_decode(shared_stack: Stack) -> None:
    printed = run_example(
        "reserve_prefill_decode.py",
        shared_stack.addresses["prefill"],
        shared_stack.addresses["decode"],
    )
    assert "prefilled 5 tokens" in printed
    assert printed.splitlines()[-1].count("[") == 8
