"""Synthetic checkpoints: published dimensions, every format, cuts, refusals."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headwater.cli.main import main
from headwater.convert.checkpoint_reader import read_source
from headwater.convert.linear_formats import LinearTarget
from headwater.errors import ConfigError
from headwater.model.layer_spec import LinearFormat, MlaSpec, MoeFfnSpec
from headwater.model.spec import ModelSpec
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import ARCHITECTURES, make_config
from headwater.synth.weights import synthetic_tensors

# Billions of parameters, as published.
PARAMETERS = {"deepseek-v3": 671, "kimi-k2": 1026, "qwen3-235b": 235, "qwen3-30b": 30.5}
FORMATS: tuple[LinearFormat, ...] = ("bf16", "fp8", "int4", "mxfp4")


@pytest.mark.parametrize("shape", PARAMETERS)
def test_published_sizes(shape: str) -> None:
    spec = ModelSpec.from_config(make_config(shape), "config.json")
    total = sum(math.prod(tensor.shape) for tensor in spec.tensors())
    assert total / 1e9 == pytest.approx(PARAMETERS[shape], rel=0.005)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_format_has_weights_of_the_right_size(
    architecture: str, fmt: LinearFormat, tmp_path: Path
) -> None:
    num_bytes = write_synthetic(
        tmp_path / "out", make_config("tiny", architecture), LinearTarget(fmt)
    )
    source = read_source(tmp_path / "out")
    assert not [name for name in source.left_out if not name.endswith("weight_shape")]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > num_bytes
    for module in source.linears:
        rows = torch.cat(list(module.rows()))
        assert rows.shape == module.shape
        assert 0.7 < float(rows.std()) * math.sqrt(module.shape[1]) < 1.5
        is_covered = fmt == "fp8" or module.is_expert
        assert source.spec.quant.format_of(module.path) == (fmt if is_covered else "bf16")


def test_every_id_decodes_and_text_survives(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "out", make_config("tiny", "mixtral"), LinearTarget("bf16"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.token_to_id("<|end|>") == 256
    text = "Grüße, 世界\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert all(tokenizer.decode([i]) for i in range(258, 2048))


def test_cuts() -> None:
    spec = ModelSpec.from_config(make_config("deepseek-v3", layers=2, experts=12), "config.json")
    dense, routed = spec.layers
    assert isinstance(routed.ffn, MoeFfnSpec)
    assert not isinstance(dense.ffn, MoeFfnSpec)
    assert isinstance(routed.attention, MlaSpec)
    assert (routed.ffn.num_experts, routed.ffn.num_groups) == (12, 4)
    assert routed.ffn.groups_per_token == 4
    assert spec.hidden_size == 7168
    few = ModelSpec.from_config(make_config("kimi-k2", layers=1, experts=4), "config.json")
    assert isinstance(few.layers[0].ffn, MoeFfnSpec)
    assert few.layers[0].ffn.experts_per_token == 4


def test_impossible_wishes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--shape: must be one of deepseek-v3, .* got 'gpt'"):
        make_config("gpt")
    with pytest.raises(ConfigError, match="--arch: is missing; shape tiny is there for deepseek"):
        make_config("tiny")
    with pytest.raises(ConfigError, match="shape kimi-k2 belongs to deepseek_v3"):
        make_config("kimi-k2", "mixtral")
    with pytest.raises(ConfigError, match="--layers: must be at least 1, got 0"):
        make_config("kimi-k2", layers=0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    spec = ModelSpec.from_config(make_config("tiny", "mixtral"), "config.json")
    needed = sum(tensor.num_bytes for tensor in synthetic_tensors(spec))
    message = f"needs {needed} bytes, has 1000 free, {needed - 1000} short"
    with pytest.raises(ConfigError, match=message):
        write_synthetic(tmp_path / "out", make_config("tiny", "mixtral"), LinearTarget("bf16"))
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, converted = tmp_path / "made", tmp_path / "converted"
    wish = ["synth", "--arch", "qwen3_moe", "--shape", "tiny", "--format", "fp8"]
    assert main([*wish, "--layers", "1", "--experts", "4", "--out", str(made)]) == 0
    assert main(["convert", str(made), str(converted), "--format", "int4", "--group", "64"]) == 0
    output = capsys.readouterr().out
    assert "headwater up --model" in output
    assert "experts.gate_up" in output
    config = json.loads((converted / "config.json").read_text())
    assert config["num_experts"] == 4
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert main([*wish, "--out", str(made)]) == 1
    assert "exists already" in capsys.readouterr().err
