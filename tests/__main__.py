"""`python -m tests`: every check of the project, in the order in which failures are cheapest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CPP_FILES = sorted(str(path) for path in (ROOT / "native").rglob("*.[ch]pp"))

CHECKS = (
    ("ruff check", [str(BIN / "ruff"), "check", "."]),
    ("ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("clang-format", [str(BIN / "clang-format"), "--dry-run", "--Werror", *CPP_FILES]),
    ("mypy headwater", [sys.executable, "-m", "mypy", "-p", "headwater"]),
    ("mypy tests", [sys.executable, "-m", "mypy", "tests", "examples"]),
    ("pytest", [sys.executable, "-m", "pytest", *sys.argv[1:]]),
)


def main() -> int:
    """Runs all checks, even past a failure; returns 1 when one failed."""
    failed = []
    for name, command in CHECKS:
        print(f"== {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


sys.exit(main())
