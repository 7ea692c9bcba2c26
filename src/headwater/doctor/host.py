"""The kernel's files, below a root that tests can put elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """/proc and /sys of a machine; what is not there reads as nothing."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
        """The content of a file, without white space around it."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted."""
        try:
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def fields(self, path: str) -> dict[str, str]:
        """The lines `name: value` of a file such as /proc/meminfo."""
        lines = (line.partition(":") for line in self.text(path).splitlines())
        return {name.strip(): value.strip() for name, colon, value in lines if colon}

    def kib(self, path: str, field: str) -> int:
        """A field `123 kB` of such a file, in bytes; zero when it is not there."""
        value = self.fields(path).get(field, "").split()
        return int(value[0]) * 1024 if value and value[0].isdigit() else 0


def parse_list(text: str) -> tuple[int, ...]:
    """'0-1,4' -> (0, 1, 4)."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def selected(text: str) -> str:
    """The chosen one of a kernel's list of choices: 'always [madvise] never' -> 'madvise'."""
    return text.partition("[")[2].partition("]")[0]


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.1f} GiB"


def shown(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 4) -> '0-2,4'."""
    parts: list[str] = []
    for number in numbers:
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(last or first) == number - 1:
            parts[-1] = f"{first}-{number}"
        else:
            parts.append(str(number))
    return ",".join(parts)
