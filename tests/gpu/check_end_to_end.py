"""Greedy answers with prompts computed on a GPU, against prompts computed on the CPU.

`python -m tests.gpu.check_end_to_end [FOLDER]`: 20 prompts through the weights segment, leased-like
pages and the CPU's decoding, as the services do it, in one process. Without a folder a synthetic
model is made. Where answers part, the difference of the log-probabilities there is shown.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

from headwater.convert.linear_formats import LinearTarget
from headwater.gpu.device import find_gpu
from headwater.gpu.prefill_session import PrefillSession
from headwater.kernels import Mode, WorkerPool
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.interface import Model
from headwater.model.spec import ModelSpec
from headwater.synth.checkpoint import write_synthetic
from headwater.synth.shapes import make_config
from headwater.weights.loader import load_weights
from tests.gpu.models import prompt

PROMPTS, ANSWER_TOKENS, BLOCK_TOKENS, MAX_TOKENS = 20, 24, 16, 512


def _pages(spec: ModelSpec) -> KvPages:
    return KvPages.allocate(
        KvLayout.of(spec, num_blocks=MAX_TOKENS // BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    )


def _answer(
    prefill: Model, decode: Model, spec: ModelSpec, tokens: list[int]
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens, and the log-probabilities that each was taken from."""
    pages, blocks = _pages(spec), range(MAX_TOKENS // BLOCK_TOKENS)
    batch = Batch.build([SequenceChunk(tokens, 0, blocks)], BLOCK_TOKENS)
    hidden = prefill.forward(batch, pages)[-1:].cpu()
    answer: list[int] = []
    scores: list[torch.Tensor] = []
    for position in range(len(tokens), len(tokens) + ANSWER_TOKENS):
        scores.append(decode.logits(hidden)[0].log_softmax(dim=-1))
        answer.append(int(scores[-1].argmax()))
        step = Batch.build([SequenceChunk(answer[-1:], position, blocks)], BLOCK_TOKENS)
        hidden = decode.forward(step, pages)
    return answer, scores


def main(folder: Path) -> None:
    """Prints a line per prompt whose answers part, and the count of those that do not."""
    spec = ModelSpec.load(folder)
    prefix = f"hwcheck-{os.getpid()}"
    store = load_weights(folder, spec.tensors(), shm_prefix=prefix)
    try:
        pool = WorkerPool(len(os.sched_getaffinity(0)))
        decode = NativeTransformer(spec, store, pool)
        on_cpu = NativeTransformer(spec, store, pool, mode=Mode.PREFILL)
        session = PrefillSession(spec, store, find_gpu(0, 8), wanted_tokens=4096)
        num_equal = 0
        for number in range(PROMPTS):
            tokens = prompt(spec, 40 + 17 * number, number)
            expected, theirs = _answer(on_cpu, decode, spec, tokens)
            found, ours = _answer(session.model, decode, spec, tokens)
            if found == expected:
                num_equal += 1
                continue
            at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            chosen = torch.tensor([expected[at], found[at]])
            apart = float((ours[at][chosen] - theirs[at][chosen]).abs().max())
            print(f"prompt {number}: parts at token {at}, log-probabilities differ by {apart:.3f}")
        print(f"{folder.name}: {num_equal} of {PROMPTS} answers are the same", flush=True)
        session.close()
    finally:
        store.segment.unlink()
        store.close()


if __name__ == "__main__":
    with torch.inference_mode():
        if len(sys.argv) > 1:
            main(Path(sys.argv[1]))
        for shape in ("mixtral", "deepseek_v3") if len(sys.argv) == 1 else ():
            with tempfile.TemporaryDirectory() as place:
                made = Path(place) / f"synthetic-{shape}"
                write_synthetic(made, make_config("tiny", shape, layers=4), LinearTarget("fp8"))
                main(made)
