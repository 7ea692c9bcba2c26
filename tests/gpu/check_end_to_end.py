"""Greedy answers in a GPU's arithmetic against those of the CPU's kernels, in one process.

`python -m tests.gpu.check_end_to_end [--exact] [--json FILE] [FOLDER ...]`: 20 prompts through the
weights segment and pages like leased ones; ours are swept (StreamedModel) and decoded by both
(HybridDecoder), theirs by the CPU alone. Without a GPU torch carries its arithmetic out on the CPU.
Without a folder synthetic models are made. Where answers part, the difference of the
log-probabilities there is shown; and the mean over all positions where they have not parted yet.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headwater.convert.linear_formats import LinearTarget
from headwater.gpu.device import find_gpu
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.hybrid_model import HybridModel
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.prefill_session import PrefillSession
from headwater.gpu.streams import HostQueues
from headwater.kernels import Mode, WorkerPool, set_exact_activations
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.interface import Model
from headwater.model.spec import ModelSpec
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import make_config
from headwater.weights.loader import load_weights
from headwater.weights.store import WeightsStore
from tests.gpu.check_services import questions
from tests.gpu.models import prompt

ANSWER_TOKENS, BLOCK_TOKENS, MAX_TOKENS = 48, 16, 1024

Answer = tuple[list[int], list[torch.Tensor]]


def _answer(prefill: Model, decode: Model, tokens: list[int], number: int) -> Answer:
    """Greedy tokens, and the log-probabilities that each was taken from."""
    layout = KvLayout.of(
        prefill.spec, num_blocks=MAX_TOKENS // BLOCK_TOKENS, block_tokens=BLOCK_TOKENS
    )
    pages, blocks = KvPages.allocate(layout), range(layout.num_blocks)
    batch = Batch.build([SequenceChunk(tokens, 0, blocks, number)], BLOCK_TOKENS)
    hidden = prefill.forward(batch, pages)[-1:].cpu().clone()
    answer: list[int] = []
    scores: list[torch.Tensor] = []
    for position in range(len(tokens), len(tokens) + ANSWER_TOKENS):
        scores.append(decode.logits(hidden)[0].log_softmax(dim=-1))
        answer.append(int(scores[-1].argmax()))
        chunk = SequenceChunk(answer[-1:], position, blocks, number)
        hidden = decode.forward(Batch.build([chunk], BLOCK_TOKENS), pages).clone()
    return answer, scores


def _compare(name: str, ours: list[Answer], theirs: list[Answer]) -> dict[str, Any]:
    apart: list[float] = []
    differences: list[float] = []
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for at, (x, y) in enumerate(zip(a[1], b[1], strict=True)):
            differences.append(float((x - y)[y.topk(2).indices].abs().max()))
            if a[0][at] != b[0][at]:
                chosen = torch.tensor([a[0][at], b[0][at]])
                apart.append(float((x - y)[chosen].abs().max()))
                print(f"prompt {number}: parts at token {at}, {apart[-1]:.4f} apart", flush=True)
                break
    found = torch.tensor(differences)
    return {
        "what": name,
        "prompts": len(ours),
        "same": len(ours) - len(apart),
        "largest_difference": max(apart, default=0.0),
        "mean_difference": float(found.mean()),
        "p99_difference": float(found.quantile(0.99)),
    }


def _tokens(folder: Path, spec: ModelSpec) -> list[list[int]]:
    """Questions as check_services asks them, or any tokens where the model knows no words."""
    if not (folder / "tokenizer.json").exists():
        return [prompt(spec, 40 + 17 * number, number) for number in range(20)]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(question).ids for question in questions()]


def _compute(folder: Path, spec: ModelSpec, store: WeightsStore) -> tuple[list[Answer], ...]:
    """Our answers and theirs."""
    pool = WorkerPool(len(os.sched_getaffinity(0)))
    decode = NativeTransformer(spec, store, pool)
    on_cpu = NativeTransformer(spec, store, pool, mode=Mode.PREFILL)
    prompts = _tokens(folder, spec)
    theirs = [_answer(on_cpu, decode, tokens, i) for i, tokens in enumerate(prompts)]
    is_on_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if is_on_gpu else "cpu")
    decoder = HybridDecoder(spec, store, pool, device, max_rows=1, max_context=MAX_TOKENS)
    both = HybridModel(decoder, decode)
    if is_on_gpu:
        with closing(PrefillSession(spec, store, find_gpu(0, 8), wanted_tokens=4096)) as session:
            return [_answer(session.model, both, t, i) for i, t in enumerate(prompts)], theirs
    plan = MemoryPlan(spec.num_layers, spec.num_layers, MAX_TOKENS, 0, 0)
    swept = StreamedModel(spec, store, lay_out(spec, store), plan, HostQueues())
    return [_answer(swept, both, t, i) for i, t in enumerate(prompts)], theirs


def main(folder: Path, *, is_exact: bool) -> dict[str, Any]:
    """Prints a line per prompt whose answers part, and gives the figures."""
    set_exact_activations(is_exact)
    spec = ModelSpec.load(folder)
    store = load_weights(folder, spec.tensors(), shm_prefix=f"hwcheck-{os.getpid()}")
    try:
        ours, theirs = _compute(folder, spec, store)
    finally:
        store.segment.unlink()
        store.close()
    found = _compare(folder.name + (", exact activations" if is_exact else ""), ours, theirs)
    print(found, flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--exact", action="store_true", help="CPUs do not round to BF16")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with torch.inference_mode(), tempfile.TemporaryDirectory() as place:
        folders = list(chosen.folders)
        for shape in () if folders else ("mixtral", "deepseek_v3"):
            folders.append(Path(place) / f"synthetic-{shape}")
            write_synthetic(folders[-1], make_config("tiny", shape, layers=4), LinearTarget("fp8"))
        figures = [main(folder, is_exact=chosen.exact) for folder in folders]
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=1) + "\n")
