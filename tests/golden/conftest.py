"""Fixtures of the golden tests: reference logits made once, models loaded by the real loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.weights.loader import load_weights
from headwater.weights.store import WeightsStore
from tests.golden.four_bit import FORMS, save_four_bit
from tests.golden.golden_models import (
    FOUR_BIT_MODELS,
    MODELS,
    load_reference,
    reference_logits,
    save_bf16,
    save_fp8,
    stable_prompts,
)

NUM_PROMPTS = 3
_SEED = 20
FOUR_BIT_PAIRS = [
    ("deepseek_v3", "pack_experts"),
    ("deepseek_v3", "awq"),
    ("deepseek_v3", "mxfp4"),
    ("qwen3_moe", "pack_asymmetric"),
    ("qwen3_moe", "gptq"),
    ("qwen3_moe", "gptq_v2"),
    ("qwen3_moe", "mxfp4"),
]


@dataclass(frozen=True)
class Golden:
    """A checkpoint, prompts int64 [3, T], and what transformers makes of them [3, T, vocab]."""

    folder: Path
    prompts: Tensor
    logits: Tensor


@pytest.fixture(scope="session", params=list(MODELS))
def golden_folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Per format: the checkpoint for us, and the one with the same values for the reference."""
    root = tmp_path_factory.mktemp(str(request.param))
    bf16, fp8, dequantized = root / "bf16", root / "fp8", root / "dequantized"
    save_bf16(MODELS[request.param], bf16, _SEED)
    save_fp8(bf16, fp8, dequantized)
    return {"bf16": (bf16, bf16), "fp8": (fp8, dequantized)}


@pytest.fixture(scope="session", params=["bf16", "fp8"])
def golden(request: pytest.FixtureRequest, golden_folders: dict[str, tuple[Path, Path]]) -> Golden:
    """Every model in every format."""
    folder, reference_folder = golden_folders[request.param]
    reference = load_reference(reference_folder)
    prompts = stable_prompts(reference, NUM_PROMPTS, _SEED)
    return Golden(folder, prompts, reference_logits(reference, prompts))


@pytest.fixture(scope="session", params=FOUR_BIT_PAIRS, ids="-".join)
def four_bit_golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Golden:
    """Every form of four bits in one model, some in both."""
    model, form = request.param
    root = tmp_path_factory.mktemp(f"{model}-{form}")
    save_bf16(FOUR_BIT_MODELS[model], root / "bf16", _SEED)
    folder, dequantized = root / form, root / "dequantized"
    save_four_bit(root / "bf16", folder, dequantized, FORMS[form])
    reference = load_reference(dequantized)
    prompts = stable_prompts(reference, NUM_PROMPTS, _SEED)
    return Golden(folder, prompts, reference_logits(reference, prompts))


@pytest.fixture
def load_model(shm_prefix: str) -> Iterator[Callable[..., Transformer | NativeTransformer]]:
    """Loads checkpoints as an engine does, through shared memory; mode None is plain torch."""
    stores: list[WeightsStore] = []
    workers = WorkerPool(2)

    def load(
        folder: Path, mode: Mode | None = None, shards: int = 1
    ) -> Transformer | NativeTransformer:
        spec = ModelSpec.load(folder)
        stores.append(load_weights(folder, spec.tensors(shards), shm_prefix=shm_prefix))
        if mode is None:
            return Transformer(spec, stores[-1])
        return NativeTransformer(spec, stores[-1], workers, mode=mode)

    with torch.inference_mode():
        yield load
    for store in stores:
        store.segment.unlink()
        store.close()
