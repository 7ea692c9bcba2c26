"""Folder to folder: exact where it can be, with the error told, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.convert.checkpoint_reader import read_source
from headwater.convert.folder import convert_folder
from headwater.convert.four_bits import quantize_int4, quantize_mxfp4
from headwater.convert.linear_formats import LinearTarget
from headwater.convert.safetensors_writer import OutTensor, write_shards
from headwater.errors import CheckpointError, ConfigError
from headwater.model.layer_spec import LinearFormat
from headwater.model.linear import Matrix, Scratch
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import make_config
from headwater.weights.checkpoint import read_checkpoint

MAX_ERRORS: dict[LinearFormat, float] = {"bf16": 2e-3, "fp8": 0.03, "int4": 0.12, "mxfp4": 0.13}


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek checkpoint in FP8 with a layer that is not part of the model."""
    folder = tmp_path_factory.mktemp("convert") / "source"
    config = make_config("tiny", "deepseek_v3") | {"num_nextn_predict_layers": 1}
    write_synthetic(folder, config, LinearTarget("fp8"))
    path = folder / "model.safetensors"
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(4, 8)}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    return folder


def _values(folder: Path) -> dict[str, Tensor]:
    return {m.path: torch.cat(list(m.rows())) for m in read_source(folder).linears}


@pytest.mark.parametrize("modules", ["experts", "all"])
@pytest.mark.parametrize("fmt", MAX_ERRORS)
def test_values_stay_near(
    source_dir: Path, tmp_path: Path, fmt: LinearFormat, modules: str
) -> None:
    out = tmp_path / "out"
    report = convert_folder(source_dir, out, LinearTarget(fmt, 64), modules)  # type: ignore[arg-type]
    before, after = _values(source_dir), _values(out)
    assert before.keys() == after.keys()
    for path, values in after.items():
        is_converted = modules == "all" or ".experts." in path
        error = float((values - before[path]).norm() / before[path].norm())
        assert error < (MAX_ERRORS[fmt] if is_converted else MAX_ERRORS["bf16"])
    assert 0 < report.errors["experts.down"] < MAX_ERRORS[fmt]
    assert report.left_out == ("model.layers.2.eh_proj.weight",)
    config = json.loads((out / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    tensors, originals = (load_file(d / "model.safetensors") for d in (out, source_dir))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(tensors[name], originals[name])
    assert (out / "tokenizer.json").read_text() == (source_dir / "tokenizer.json").read_text()


def test_four_bits_are_a_fixed_point(source_dir: Path, tmp_path: Path) -> None:
    """What MXFP4 can say, it says again without an error."""
    target = LinearTarget("mxfp4")
    convert_folder(source_dir, tmp_path / "first", target)
    report = convert_folder(tmp_path / "first", tmp_path / "second", target)
    assert report.errors["experts.gate_up"] == report.errors["experts.down"] == 0


def test_what_cannot_be_is_refused_and_leaves_nothing(source_dir: Path, tmp_path: Path) -> None:
    config = make_config("tiny", "mixtral") | {"intermediate_size": 192}
    write_synthetic(tmp_path / "in", config, LinearTarget("bf16"))
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide its 192 .* --group 64"):
        convert_folder(tmp_path / "in", tmp_path / "out", LinearTarget("int4", 128))
    with pytest.raises(ConfigError, match="exists already"):
        convert_folder(source_dir, tmp_path / "in", LinearTarget("int4"))
    tensors = load_file(source_dir / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    tensors[name][0, 0] = float("inf")
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(tensors, broken / "model.safetensors")
    (broken / "config.json").write_text((source_dir / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"'{name}': holds a scale that is not finite"):
        convert_folder(broken, tmp_path / "out", LinearTarget("bf16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "in"]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_codes_mean_what_is_said(group: int) -> None:
    torch.manual_seed(group)
    rows = torch.randn(5, 256)
    rows[1] = 0
    rows[2, :group] = 1e-30
    packed, scale, values = quantize_int4(rows, group)
    assert torch.equal(Matrix(packed, scale, Scratch()).expand(0, 5), values)
    assert float((values - rows)[3:].norm() / rows[3:].norm()) < 0.12
    assert values[1].count_nonzero() == 0
    # No code is further from its value than half a step, but for those beyond the largest one.
    steps = scale.float().repeat_interleave(group, 1)
    is_inside = rows.abs() <= 7 * steps
    assert bool(((values - rows).abs() <= steps / 2 * 1.0001)[is_inside].all())


def test_mxfp4_codes_mean_what_is_said() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 64)
    rows[1] = 0
    rows[2] *= 1e30
    rows[3] *= 1e-30
    packed, scale, values = quantize_mxfp4(rows)
    assert torch.equal(Matrix(packed, scale, Scratch()).expand(0, 6), values)
    assert scale.dtype == torch.uint8
    assert values[1].count_nonzero() == 0
    for row in (0, 2, 3, 4, 5):
        exact = rows[row].double()
        assert float((values[row] - exact).norm() / exact.norm()) < 0.15


def test_shards_and_their_index(tmp_path: Path) -> None:
    def out(name: str, size: int) -> OutTensor:
        runs = [torch.full((size // 2,), len(name)), torch.full((size - size // 2,), 7)]
        return OutTensor(name, "I64", (size,), lambda: runs)

    (tmp_path / "config.json").write_text("{}")
    progress: list[tuple[int, int]] = []
    tensors = [out("a", 3), out("bb", 4), out("ccc", 40), out("dddd", 1)]
    write_shards(tmp_path, tensors, lambda *done: progress.append(done), max_shard_bytes=64)
    found = read_checkpoint(tmp_path)
    assert list(found.tensors) == ["a", "bb", "ccc", "dddd"]
    assert len({tensor.file for tensor in found.tensors.values()}) == 3
    assert progress[-1] == (48 * 8, 48 * 8)
    values = load_file(found.tensors["ccc"].file)["ccc"]
    assert values.tolist() == [3] * 20 + [7] * 20
