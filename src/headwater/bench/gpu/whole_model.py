"""How far whole models are apart after a prompt of text: a sweep's recipes, and the CPU's kernels.

Owns the comparison with the reference (headwater.model.transformer) on the same weights: with
nothing rounded but the cache, which is the truth here; and, as `from_reference`, with activations
rounded to BF16 before each product, as on CPUs. The CPU's own kernels, of this machine's
instruction set and of another one, tell how far apart results are that differ in nothing but the
order of FP32 sums: an activation that lies near the middle falls the other way, layer after layer.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import queues_on
from headwater.kernels import Mode, WorkerPool, isa
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.linear import exact_activations
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.weights.loader import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headwater.model.interface import Model
    from headwater.model.source import Weights

BLOCK_TOKENS = 16
Found = tuple[Tensor, Tensor]
"""Hidden states after the last layer [T, hidden], and all entries of the cache."""


def bench_whole_model(
    folder: Path, prompts: Sequence[Sequence[int]], device: torch.device, other_isa: str
) -> Iterator[dict[str, Any]]:
    """A row per prompt and way to compute it, against the reference without rounding."""
    spec = ModelSpec.load(folder)
    store = load_weights(folder, spec.tensors(), shm_prefix=f"hwbench-{os.getpid()}")
    try:
        with torch.inference_mode():
            reference = Transformer(spec, store)
            rounded = [_compute(reference, prompt) for prompt in prompts]
            with exact_activations():
                exact = [_compute(reference, prompt) for prompt in prompts]
                likely = [_scores(reference, hidden) for hidden, _ in exact]
            ways = _ways(spec, store, folder, prompts, device, other_isa)
            for name, found in itertools.chain([("CPU reference", rounded)], ways):
                for number, ours in enumerate(found):
                    with exact_activations():
                        scores = _scores(reference, ours[0])
                    row = {"what": name, "prompt": number, "tokens": len(prompts[number])}
                    row |= _apart(ours, exact[number]) | _scores_apart(scores, likely[number])
                    between = _apart(ours, rounded[number])
                    yield row | {f"{key}_from_reference": between[key] for key in between}
    finally:
        store.segment.unlink()
        store.close()


def _ways(
    spec: ModelSpec,
    weights: Weights,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    other_isa: str,
) -> Iterator[tuple[str, list[Found]]]:
    pool = WorkerPool(len(os.sched_getaffinity(0)))
    native = NativeTransformer(spec, weights, pool, mode=Mode.PREFILL)
    yield f"CPU kernels, {isa()}", [_compute(native, prompt) for prompt in prompts]
    yield f"CPU kernels, {other_isa}", _in_another_process(folder, prompts, other_isa)
    layout = lay_out(spec, weights)
    recipes = [("W8A16", 0), ("W8A8", 1)] if spec.quant.kind == "fp8" else [("FP16", 0)]
    for name, quantize_from in recipes:
        plan = MemoryPlan(spec.num_layers, spec.num_layers, max(map(len, prompts)), 0, 0)
        model = StreamedModel(
            spec, weights, layout, plan, queues_on(device), quantize_from=quantize_from
        )
        yield f"sweep, {name}", [_compute(model, prompt) for prompt in prompts]


def _compute(model: Model, prompt: Sequence[int]) -> Found:
    blocks = range(-(-len(prompt) // BLOCK_TOKENS))
    layout = KvLayout.of(model.spec, num_blocks=len(blocks), block_tokens=BLOCK_TOKENS)
    pages = KvPages.allocate(layout)
    batch = Batch.build([SequenceChunk(list(prompt), 0, blocks)], BLOCK_TOKENS)
    hidden = model.forward(batch, pages).cpu().clone()
    return hidden, torch.stack([layer.float() for layer in pages.layers])


def _in_another_process(
    folder: Path, prompts: Sequence[Sequence[int]], instruction_set: str
) -> list[Found]:
    """By the CPU kernels of another instruction set, which a process chooses when it begins."""
    before = os.environ.get("HEADWATER_FORCE_ISA")
    os.environ["HEADWATER_FORCE_ISA"] = instruction_set
    try:
        with tempfile.TemporaryDirectory() as place:
            target = Path(place) / "found.pt"
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=_compute_all, args=(folder, prompts, target))
            process.start()
            process.join()
            found: list[Found] = torch.load(target)
            return found
    finally:
        if before is None:
            del os.environ["HEADWATER_FORCE_ISA"]
        else:
            os.environ["HEADWATER_FORCE_ISA"] = before


def _compute_all(folder: Path, prompts: Sequence[Sequence[int]], target: Path) -> None:
    spec = ModelSpec.load(folder)
    store = load_weights(folder, spec.tensors(), shm_prefix=f"hwbench-{os.getpid()}")
    try:
        with torch.inference_mode():
            pool = WorkerPool(len(os.sched_getaffinity(0)))
            native = NativeTransformer(spec, store, pool, mode=Mode.PREFILL)
            torch.save([_compute(native, prompt) for prompt in prompts], target)
    finally:
        store.segment.unlink()
        store.close()


def _scores(reference: Transformer, hidden: Tensor) -> Tensor:
    return reference.logits(hidden).log_softmax(dim=-1)


def _apart(ours: Found, theirs: Found) -> dict[str, float]:
    """L2 of the differences over L2 of what is expected."""
    (hidden, entries), (wanted, wanted_entries) = ours, theirs
    return {
        "hidden_error": float((hidden - wanted).norm() / wanted.norm()),
        "last_hidden_error": float((hidden[-1] - wanted[-1]).norm() / wanted[-1].norm()),
        "kv_error": float((entries - wanted_entries).norm() / wanted_entries.norm()),
    }


def _scores_apart(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Of the reference's two most likely tokens at each position, FP32 [T, vocabulary] both."""
    best = theirs.topk(2, dim=-1).indices
    apart = (ours.gather(1, best) - theirs.gather(1, best)).abs()
    return {
        "log_probability_mean": float(apart.mean()),
        "log_probability_above_0_02": float((apart > 0.02).float().mean()),
        "log_probability_max": float(apart.max()),
        "same_most_likely": float((ours.argmax(-1) == best[:, 0]).float().mean()),
    }
