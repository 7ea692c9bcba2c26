"""`headwater bench serve` against a live stack: tables, files, and clear refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from headwater.cli.main import main
from tests.integration.stack import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.stack import Stack


def bench(stack: Stack, *options: str) -> int:
    router = f"router.listen={stack.addresses['router']}"
    return main(["bench", "serve", "--set", router, *options])


def test_loads_scenarios_and_files(
    shared_stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "loads.json", tmp_path / "loads.svg"
    mix = ("--mix", "20:8", "40-60:4:0.5", "--requests", "6", "--repeats", "2")
    outputs = ("--json", str(figures), "--plot", str(picture))
    goals = ("--ttft", "60", "--tpot", "60")
    assert bench(shared_stack, "--concurrency", "1", "3", *mix, *outputs, *goals) == 0
    assert "3 at once" in capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert str(tmp_path) not in written["command"].partition("--json")[0]
    one, three = written["figures"]["loads"]
    assert (one["num_requests"], one["num_completed"], one["attainment"]) == (12, 12, 1.0)
    assert len(three["repeats"]) == 2
    assert three["output_tokens"] >= 12 * 4
    assert picture.read_text().lstrip().startswith("<?xml")

    assert bench(shared_stack, "--rate", "50", *mix) == 0
    assert "50/s" in capsys.readouterr().out

    trace = tmp_path / "trace.jsonl"
    entry = {"timestamp": 1, "input_length": 30, "output_length": 3}
    trace.write_text(f"{json.dumps(entry)}\n" * 3)
    assert bench(shared_stack, "--trace", str(trace), "--repeats", "1") == 0

    outputs = ("--json", str(figures), "--plot", str(tmp_path / "set.png"))
    options = ("--repeats", "2", "--warm-ups", "0", *outputs)
    assert bench(shared_stack, "--scenario", "standard", *options) == 0
    captured = capsys.readouterr()
    assert "prefill-90k has 480 tokens: the model's context holds 512" in captured.err
    rows = json.loads(figures.read_text())["figures"]
    assert [row["load"] for row in rows] == ["prose", "code", "prefill-10k", "prefill-90k"]
    assert rows[3]["prompt_tokens"] == 480
    assert rows[3]["cached_tokens"] == 0


def test_refusals_are_one_line(shared_stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(shared_stack, "--mix", "600:8") == 1
    assert "the model's context of 512" in capsys.readouterr().err
    assert bench(shared_stack, "--openai", "http://127.0.0.1:1/v1") == 1
    assert "--model-name" in capsys.readouterr().err
    nobody = f"router.listen=127.0.0.1:{free_port()}"
    assert main(["bench", "serve", "--set", nobody]) == 1
    assert "headwater bench: " in capsys.readouterr().err
