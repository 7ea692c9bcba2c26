"""`headwater doctor`: examines the machine; see headwater.doctor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from headwater.doctor.finding import Finding, Level
from headwater.doctor.run import examine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from headwater.config import Config

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_TOPIC_WIDTH = 16
_LEVEL_WIDTH = 8
# Where there is no terminal, lines are not to be broken.
_PIPE_WIDTH = 1000


def doctor(arguments: argparse.Namespace, config: Config) -> int:
    """Prints findings; the status is that of the worst: 0 ok, 1 warning, 2 error."""
    findings: list[Finding] = []
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    for finding in examine(config):
        findings.append(finding)
        if not arguments.json:
            # As they come: some take a second to measure.
            console.print(line(finding))
    if arguments.json:
        print(json.dumps(as_json(findings), indent=2))
    else:
        console.print(summary(findings))
    return worst(findings).exit_status


def line(finding: Finding) -> Text:
    """A finding for people; the remedy on a line of its own."""
    text = Text()
    text.append(f"{finding.level.value:{_LEVEL_WIDTH}}", style=_STYLES[finding.level])
    text.append(f"{finding.topic:{_TOPIC_WIDTH}}{finding.text}")
    if finding.remedy:
        text.append(f"\n{'':{_LEVEL_WIDTH + _TOPIC_WIDTH}}-> {finding.remedy}")
    return text


def summary(findings: Sequence[Finding]) -> str:
    """How many of each level."""
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    return ", ".join(f"{count} {level.value}" for level, count in counts.items())


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """For programs: the worst level, and all findings."""
    return {
        "level": worst(findings).value,
        "findings": [
            {
                "topic": finding.topic,
                "level": finding.level.value,
                "text": finding.text,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
    }


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level there is."""
    return max((f.level for f in findings), key=lambda level: level.exit_status, default=Level.OK)
