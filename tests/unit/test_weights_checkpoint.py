"""Reading checkpoint folders: what is found, and each way a folder can be broken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headwater.errors import CheckpointError
from headwater.weights.checkpoint import read_checkpoint


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(begin: int, end: int, dtype: object = "F32", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    return tmp_path


def test_a_single_file_is_indexed_without_reading_its_data(folder: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config_json == '{"model_type": "tiny"}'
    found = checkpoint.tensors["a"]
    assert (found.dtype, found.shape, found.num_bytes) == ("F32", (2, 3), 24)
    with found.file.open("rb") as file:
        file.seek(found.file_offset)
        assert file.read(24) == tensors["a"].numpy().tobytes()
    assert checkpoint.tensors["b"].dtype == "BF16"


def test_shards_are_joined_by_their_index(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(3), "unlisted": torch.zeros(1)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {t.file.name for t in read_checkpoint(folder).tensors.values()} == {
        "one.safetensors",
        "two.safetensors",
    }
    assert set(read_checkpoint(folder).tensors) == {"a", "b"}


def test_the_digest_follows_config_header_size_and_time(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    first = read_checkpoint(folder).digest
    assert read_checkpoint(folder).digest == first
    os.utime(path, ns=(1, 1))
    second = read_checkpoint(folder).digest
    (folder / "config.json").write_text("{}")
    third = read_checkpoint(folder).digest
    save_file({"b": torch.zeros(2)}, path)
    os.utime(path, ns=(1, 1))
    assert len({first, second, third, read_checkpoint(folder).digest}) == 4


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 8)}, b"1234", "is truncated: its header describes .* bytes, it has"),
        ({"a": entry(0, 4)}, b"12345678", "has bytes that no tensor covers"),
        ({"a": entry(4, 8)}, b"12345678", "tensor 'a': its data begins at byte"),
        ({"a": entry(0, 8), "b": entry(4, 8)}, b"12345678", "tensor 'b': its data begins"),
        ({"a": entry(0, 8, shape=[3])}, b"12345678", "'data_offsets' spans 8 bytes.*need 12"),
        ({"a": entry(0, 8, dtype="F31")}, b"12345678", "'dtype': unknown value 'F31'"),
        ({"a": entry(0, 8, shape=[-2])}, b"12345678", "'shape': expected sizes"),
        ({"a": entry(0, 8, shape=[True])}, b"12345678", "'shape': expected sizes"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "'data_offsets': expected .* got None"),
        ({"a": 3}, b"", "tensor 'a': expected a JSON object, got 3"),
        ([1], b"", "expected a JSON object, got list"),
        (b"{", b"", "is not valid JSON"),
        (b"\xff\xfe", b"", "is not UTF-8"),
        (b'{"a": 1, "a": 2}', b"", "field 'a' occurs twice"),
        (b"[" * 100_000, b"", "is not valid JSON"),
    ],
)
def test_broken_headers_are_refused(
    folder: Path, header: object, data: bytes, message: str
) -> None:
    write_raw(folder / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"1234567", (2**40).to_bytes(8, "little") + b"{}"])
def test_a_file_cut_inside_its_header_is_truncated(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is truncated: it has"):
        read_checkpoint(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "'weight_map' is missing or empty"),
        ({"weight_map": {"a": "../x.safetensors"}}, "tensor 'a': expected a plain file name"),
        ({"weight_map": {"a": 3}}, "tensor 'a': expected a plain file name, got 3"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone\.safetensors: no such file"),
        ({"weight_map": {"z": "one.safetensors"}}, "tensor 'z' should be in one.safetensors"),
    ],
)
def test_broken_indexes_are_refused(folder: Path, index: object, message: str) -> None:
    save_file({"a": torch.zeros(2)}, folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)
