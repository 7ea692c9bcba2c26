"""Converts a checkpoint folder to another format of its linear weights, tensor by tensor.

Owns which weights are converted, what is copied beside them, and the config that says so. Memory
stays bounded by a few runs of rows, whatever the size of the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headwater.convert.checkpoint_reader import LinearModule, Source, read_source
from headwater.convert.linear_formats import Error, LinearTarget
from headwater.convert.new_folder import new_folder
from headwater.convert.safetensors_writer import OutTensor, ProgressFunction, write_shards
from headwater.weights.checkpoint import CONFIG_FILE, INDEX_FILE, CheckpointTensor
from headwater.weights.conversion import raw_chunks

Modules = Literal["experts", "all"]
"""Which linear weights take the new format; those that do not are written in BF16."""

_QUANT_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What came of it: the relative L2 error by class of weight, and tensors left out."""

    errors: dict[str, float]
    num_bytes: int
    left_out: tuple[str, ...]


def convert_folder(
    source_dir: Path,
    out_dir: Path,
    target: LinearTarget,
    modules: Modules = "experts",
    on_progress: ProgressFunction | None = None,
) -> ConversionReport:
    """Writes the checkpoint folder `out_dir`, which must not exist; it appears when complete.

    The router's gates, norms, embeddings and the head are copied as they are, and so are the files
    of the tokenizer. Tensors that are not part of the model, such as those of extra layers for
    multi-token prediction, are left out.

    Raises CheckpointError for a broken source, ConfigError for a folder that cannot be written and
    for groups that do not divide a weight's columns.
    """
    source = read_source(source_dir)
    errors: dict[str, Error] = {}
    kept: list[str] = []
    tensors: list[OutTensor] = []
    for module in source.linears:
        is_converted = modules == "all" or module.is_expert
        if not is_converted:
            kept.append(module.path)
        chosen = target if is_converted else LinearTarget("bf16")
        error = errors.setdefault(_class_of(module), Error())
        tensors += chosen.tensors(module.path, module.shape, module.rows, error)
    tensors += [_copied(tensor) for tensor in source.others]
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    with new_folder(out_dir, num_bytes) as building:
        _copy_files(source_dir, building)
        write_shards(building, tensors, on_progress)
        config = _config(source, target, [*_never_converted(source), *kept])
        (building / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return ConversionReport(
        {name: error.relative for name, error in errors.items()}, num_bytes, source.left_out
    )


def _class_of(module: LinearModule) -> str:
    """layers.3.experts.gate_up -> experts.gate_up."""
    return module.name.split(".", 2)[2]


def _copied(tensor: CheckpointTensor) -> OutTensor:
    def make() -> Iterator[torch.Tensor]:
        for run in raw_chunks(tensor):
            yield torch.from_numpy(run)

    return OutTensor(tensor.name, tensor.dtype, tensor.shape, make)


def _never_converted(source: Source) -> list[str]:
    """Linear modules, to other engines, that have no quantised form here."""
    gates = [t.name for t in source.others if t.name.endswith(".gate.weight")]
    return ["lm_head", *(name.removesuffix(".weight") for name in gates)]


def _config(source: Source, target: LinearTarget, kept: list[str]) -> dict[str, object]:
    config: dict[str, object] = json.loads(source.checkpoint.config_json)
    for field in _QUANT_FIELDS:
        config.pop(field, None)
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0  # they were left out
    quantization = target.config(kept)
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


def _copy_files(source_dir: Path, out_dir: Path) -> None:
    """Everything but weights and config: tokenizer, chat template, generation settings, licence."""
    for path in sorted(source_dir.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        if path.is_file() and not is_weights and path.name not in (CONFIG_FILE, INDEX_FILE):
            shutil.copyfile(path, out_dir / path.name)
