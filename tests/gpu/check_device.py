"""The streamed model and the hybrid decoder on a GPU against what they compute on a CPU.

`python -m tests.gpu.check_device`: a line per model and kind of activations, with the relative
error of the last hidden states and of the keys and values. The kernels have kernel_cases.py.
"""

from __future__ import annotations

import sys

import torch

from headwater.bench.gpu.random_model import RandomModel
from headwater.gpu.device import find_gpu
from headwater.gpu.dual_batch import micro_batches
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.prefill_session import PrefillSession
from headwater.gpu.streams import queues_on
from headwater.kernels import WorkerPool
from headwater.kv.layout import KvKind
from headwater.model.batch import SequenceChunk
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.synth.shapes import ARCHITECTURES, make_config
from tests.gpu.models import pages_of, prompt, run, written
from tests.gpu.samples import relative_error

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def check(architecture: str, device: torch.device) -> None:
    """Two packed prompts, whole and cut in two, with either kind of activations."""
    config = make_config("tiny", architecture, layers=4) | {"quantization_config": FP8}
    spec = ModelSpec.from_config(config, "config.json")
    weights = RandomModel(spec, 2)
    first, second = prompt(spec, 61, 1), prompt(spec, 9, 2)
    blocks = list(range(20, 36))
    chunks = SequenceChunk(first, 0, blocks), SequenceChunk(second, 0, [3, 5, 7])
    expected_pages = pages_of(spec)
    expected = run(Transformer(spec, weights), expected_pages, *chunks)
    is_mla = spec.kv.kind is KvKind.MLA
    for quantize_from in (0, 1):
        layout = lay_out(spec, weights, group_bytes=1 << 20)
        plan = MemoryPlan(2, 3, 1 << 10, 0, 0)
        model = StreamedModel(
            spec, weights, layout, plan, queues_on(device), quantize_from=quantize_from
        )
        pages = pages_of(spec)
        hidden = run(model, pages, *chunks)
        again = run(model, pages, *chunks)
        half = run(model, pages, SequenceChunk(first[40:], 40, blocks), chunks[1])
        errors = ((hidden - expected).norm(dim=1) / expected.norm(dim=1)).sort().values
        entries = [written(p, blocks, 61, is_mla) for p in (pages, expected_pages)]
        print(
            f"{architecture} {'fp8' if quantize_from else 'fp16'} activations:"
            f" hidden {relative_error(hidden, expected):.1e}, nine of ten tokens below"
            f" {float(errors[int(0.9 * len(errors))]):.1e}, kv {relative_error(*entries):.1e},"
            f" repeated {relative_error(again, hidden):.1e},"
            f" second half {relative_error(half[:21], hidden[40:61]):.1e}",
            flush=True,
        )


def check_hybrid(architecture: str, device: torch.device) -> None:
    """Decode steps on `device` against the same on a CPU, merged and as two micro-batches."""
    config = make_config("tiny", architecture, layers=4) | {"quantization_config": FP8}
    spec = ModelSpec.from_config(config, "config.json")
    weights = RandomModel(spec, 2)
    tokens = torch.tensor([prompt(spec, 12, seed) for seed in range(5)])
    found = []
    for place in (torch.device("cpu"), device):
        for is_dual in (False, True):
            decoder = HybridDecoder(
                spec, weights, WorkerPool(2), place, max_rows=5, max_context=300, lanes=2
            )
            parts = micro_batches(5, is_dual=is_dual)
            logits = [
                decoder.logits(decoder.step(parts, tokens[:, i], torch.full((5,), i))[0]).clone()
                for i in range(12)
            ]
            found.append(torch.stack(logits).flatten(0, 1))
    for name, ours in zip(("merged", "dual"), found[2:], strict=True):
        errors = ((ours - found[0]).norm(dim=1) / found[0].norm(dim=1)).sort().values
        print(
            f"{architecture} hybrid {name}: three of four steps below"
            f" {float(errors[int(0.75 * len(errors))]):.1e}, all below {float(errors[-1]):.1e}",
            flush=True,
        )


def check_memory(device: torch.device) -> None:
    """What a session had is there for the next one of the same process."""
    config = make_config("tiny", "deepseek_v3", layers=4) | {"quantization_config": FP8}
    spec = ModelSpec.from_config(config, "config.json")
    weights = RandomModel(spec, 2)
    for _ in range(2):
        gpu = find_gpu(device.index or 0, 4.0)
        kept = torch.cuda.memory_reserved(device)
        session = PrefillSession(spec, weights, gpu, wanted_tokens=512)
        run(session.model, pages_of(spec), SequenceChunk(prompt(spec, 60, 1), 0, list(range(16))))
        session.close()
        del session
    print(f"kept of a session that ended: {kept} bytes", flush=True)
    assert kept < 1 << 20


if __name__ == "__main__":
    with torch.inference_mode():
        check_memory(torch.device(*sys.argv[1:] or ["cuda:0"]))
        for name in ARCHITECTURES:
            check(name, torch.device(*sys.argv[1:] or ["cuda:0"]))
            check_hybrid(name, torch.device(*sys.argv[1:] or ["cuda:0"]))
