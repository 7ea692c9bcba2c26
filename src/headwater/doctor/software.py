"""Ports and versions: whether the processes can start and talk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.doctor.finding import Finding, error, ok

PORTS = "ports"
VERSIONS = "versions"

# pyproject.toml: requires-python
_LEAST_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Port:
    """An address that a process wants; `problem` says why it cannot be bound.

    `owner_pid` is the process of this stack that has it already.
    """

    setting: str
    address: str
    problem: str = ""
    owner_pid: int | None = None


def check_ports(ports: tuple[Port, ...]) -> list[Finding]:
    """Whether each address is free, or this stack's own."""
    findings = []
    for port in ports:
        text = f"{port.setting} {port.address}"
        if not port.problem:
            findings.append(ok(PORTS, f"{text} is free"))
        elif port.owner_pid is not None:
            findings.append(ok(PORTS, f"{text} is in use by this stack (pid {port.owner_pid})"))
        else:
            remedy = f"stop what uses it (ss -ltnp), or choose another with {port.setting}"
            findings.append(error(PORTS, f"{text}: {port.problem}", remedy))
    return findings


def check_versions(
    python: tuple[int, int, int],
    kernel: str,
    packages: Mapping[str, str],
    needed: Mapping[str, str],
) -> list[Finding]:
    """`packages` are the installed ones, empty: missing; `needed` says what each is needed for."""
    present = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    text = f"Python {'.'.join(map(str, python))}, Linux {kernel}, {present}"
    findings = []
    if python[:2] < _LEAST_PYTHON:
        remedy = "install Python 3.11 or later"
        findings.append(error(VERSIONS, f"{text}; Python is too old", remedy))
    else:
        findings.append(ok(VERSIONS, text))
    for name, version in packages.items():
        if not version:
            findings.append(
                error(VERSIONS, f"{name} is missing: {needed[name]}", f"pip install {name}")
            )
    return findings
