"""Prints the requirements of pyproject.toml: the project's own, or those of the named extras.

`build-system` names what building takes.
"""

import sys
import tomllib
from pathlib import Path

pyproject = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
groups = {
    **pyproject["project"]["optional-dependencies"],
    "build-system": pyproject["build-system"]["requires"],
}
chosen = [groups[name] for name in sys.argv[1:]] or [pyproject["project"]["dependencies"]]
for requirements in chosen:
    sys.stdout.writelines(f"{requirement}\n" for requirement in requirements)
