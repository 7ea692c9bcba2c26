"""Writes a synthetic checkpoint folder: config, weights and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwater.convert.checkpoint_reader import is_linear
from headwater.convert.linear_formats import LinearTarget
from headwater.convert.new_folder import new_folder
from headwater.convert.safetensors_writer import ProgressFunction, write_shards
from headwater.model.spec import ModelSpec
from headwater.synth.tokenizer import write_tokenizer
from headwater.synth.weights import synthetic_tensors


def write_synthetic(
    out_dir: Path,
    config: dict[str, Any],
    target: LinearTarget,
    on_progress: ProgressFunction | None = None,
) -> int:
    """Writes `out_dir`, which must not exist; it appears when complete. Returns its weights' bytes.

    `config` is that of the model in BF16. FP8 covers all linear weights, as in the published
    checkpoints; four-bit formats cover the routed experts and leave the others in BF16.

    Raises ConfigError when the folder cannot be written, when the disk is too small, and when the
    format's groups do not divide a weight's columns; CheckpointError for an impossible config.
    """
    source = str(out_dir / "config.json")
    plain = ModelSpec.from_config(config, source)
    config = config | quantization_of(plain, target)
    spec = ModelSpec.from_config(config, source)
    tensors = synthetic_tensors(spec)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    with new_folder(out_dir, num_bytes) as building:
        (building / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(building, spec.vocab_size)
        write_shards(building, tensors, on_progress)
    return num_bytes


def quantization_of(plain: ModelSpec, target: LinearTarget) -> dict[str, Any]:
    """What a config.json of `plain` in the target's format says beside the rest."""
    kept = ["lm_head"]
    for tensor in plain.tensors():
        is_router = tensor.name.endswith(".gate") and not is_linear(tensor)
        is_covered = target.format == "fp8" or ".experts." in tensor.name
        if is_router or (is_linear(tensor) and not is_covered):
            kept += [part.source.removesuffix(".weight") for part in tensor.parts]
    quantization = target.config(kept)
    return {} if quantization is None else {"quantization_config": quantization}
