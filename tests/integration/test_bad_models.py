"""A broken checkpoint ends the decode process with one clear sentence and leaves no segment."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.shm import list_segments
from tests.integration.stack import free_port
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GATE = "model.layers.1.block_sparse_moe.gate.weight"
DOWN = "model.layers.0.block_sparse_moe.experts.2.w2.weight"


def change_config(**fields: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def change_tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        save_file(tensors, path)

    return apply


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(truncate, ["model.safetensors", "bytes"], id="truncated"),
        pytest.param(
            change_tensor(GATE, torch.zeros(4, 64, dtype=torch.float64)),
            ["model.safetensors", GATE, "F64", "BF16"],
            id="dtype",
        ),
        pytest.param(
            change_tensor(DOWN, torch.zeros(64, 95, dtype=torch.bfloat16)),
            ["model.safetensors", DOWN, "95", "96"],
            id="shape",
        ),
        pytest.param(change_tensor(GATE, None), [GATE], id="missing"),
        pytest.param(
            change_config(architectures=["Llama5ForCausalLM"]),
            ["config.json", "architectures", "Llama5ForCausalLM", "MixtralForCausalLM"],
            id="architecture",
        ),
        pytest.param(
            change_config(num_experts_per_tok=9),
            ["config.json", "num_experts_per_tok", "9"],
            id="range",
        ),
        pytest.param(
            change_config(hidden_size="64"), ["config.json", "hidden_size", "64"], id="type"
        ),
    ],
)
def test_decode_refuses_a_broken_checkpoint(
    damage: Callable[[Path], None], words: list[str], tmp_path: Path, shm_prefix: str
) -> None:
    damage(write_tiny_model(tmp_path))
    assert_refused("decode", tmp_path, shm_prefix, words)


def test_router_refuses_a_folder_without_tokenizer(tmp_path: Path, shm_prefix: str) -> None:
    drop_tokenizer(write_tiny_model(tmp_path))
    assert_refused("router", tmp_path, shm_prefix, ["tokenizer.json"])


def assert_refused(service: str, model: Path, shm_prefix: str, words: list[str]) -> None:
    """The process ends by itself, with exit status 1 and a last line that holds all words."""
    command = [sys.executable, "-m", f"headwater.services.{service}"]
    for setting in (
        f"model.path={model}",
        f"shm.prefix={shm_prefix}",
        f"{service}.listen=127.0.0.1:{free_port()}",
    ):
        command += ["--set", setting]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith(f"headwater {service}: ")
    for word in words:
        assert word in sentence
    assert "Traceback" not in result.stderr
    assert list_segments(f"{shm_prefix}.") == []
