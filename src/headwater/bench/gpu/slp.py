"""Stream-loading prefill at a published shape: time to the last hidden state, link use, floors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.gpu.link import link_gb_per_s
from headwater.bench.gpu.random_model import RandomModel
from headwater.gpu.device import find_gpu
from headwater.gpu.prefill_session import PrefillSession
from headwater.gpu.softmax_attention import trial_seconds
from headwater.kv.layout import KvLayout
from headwater.kv.pages import KvPages
from headwater.model.batch import Batch, SequenceChunk
from headwater.model.layer_spec import MlaSpec, MoeFfnSpec
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from headwater.gpu.layout import ModelLayout
    from headwater.gpu.prefill_model import StreamedModel

BLOCK_TOKENS = 64
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def published_spec(shape: str, experts: int | None = None) -> ModelSpec:
    """A published shape with FP8 weights."""
    config = make_config(shape, experts=experts) | {"quantization_config": FP8}
    return ModelSpec.from_config(config, "config.json")


def bench_slp(
    shape: str,
    lengths: Sequence[int],
    *,
    distinct: int,
    vram_gib: float,
    quantize_from: int,
    experts: int | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[dict[str, Any]]:
    """One row per prompt length, shortest first; then one of the whole run.

    Weights are random, and `distinct` routed layers are repeated. A sweep ends with the last hidden
    state: the first token's own cost, lm_head on decode's side, is not in it.
    """
    spec = published_spec(shape, experts)
    began_at = time.monotonic()
    weights = RandomModel(spec, distinct)
    say(f"{weights.num_bytes / 1e9:.1f} GB of weights in {time.monotonic() - began_at:.0f} s")
    gpu = find_gpu(0, vram_gib)
    if vram_gib:
        total = torch.cuda.get_device_properties(gpu.device).total_memory
        torch.cuda.set_per_process_memory_fraction(vram_gib * 2**30 / total, gpu.device)
    session = PrefillSession(
        spec, weights, gpu, wanted_tokens=max(lengths), quantize_from=quantize_from
    )
    session.ranges.wait(session.ranges.num_ranges - 1)
    registered = session.ranges.registered_bytes
    say(f"registered {registered / 1e9:.1f} GB in {session.ranges.seconds:.1f} s")
    sources = [experts_of(spec, weights)]
    say(f"link: {link_gb_per_s(sources, gpu.device):.2f} GB/s; plan: {session.plan}")
    pages = pages_for(spec, max(lengths))
    with torch.inference_mode():
        for length in lengths:
            link = link_gb_per_s(sources, gpu.device)
            yield sweep_row(session, spec, pages, length, link, quantize_from)
    yield {
        "what": "run",
        "link_gb_per_s_after": link_gb_per_s(sources, gpu.device),
        "register_seconds_per_gib": session.ranges.seconds / registered * 2**30,
        "ring_bytes": session.plan.ring_bytes,
        "expert_slots": session.plan.expert_slots,
        "gpu": gpu.name,
        "attention_trials_ms": _trials(spec, gpu.device),
    }
    session.close()


def sweep_row(
    session: PrefillSession,
    spec: ModelSpec,
    pages: KvPages,
    length: int,
    link: float,
    quantize_from: int,
) -> dict[str, Any]:
    """A whole sweep of a prompt of `length` tokens, and the floors under it."""
    model = session.model
    batch = batch_of(spec, length)
    floor = compute_floor(model, session.layout, spec, batch, pages)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = model.streamer.copied_bytes
    torch.cuda.synchronize(model.device)
    began_at = time.monotonic()
    hidden = model.forward(batch, pages)
    torch.cuda.synchronize(model.device)
    seconds = time.monotonic() - began_at
    assert bool(torch.isfinite(hidden).all()), "the sweep gave no numbers"
    copied = model.streamer.copied_bytes - before
    transfer = copied / link / 1e9
    return {
        "what": "slp",
        "tokens": length,
        "ttft_s": seconds,
        "tokens_per_s": length / seconds,
        "streamed_gb": copied / 1e9,
        "link_gb_per_s": link,
        "h2d_gb_per_s": copied / seconds / 1e9,
        "h2d_ratio": copied / seconds / 1e9 / link,
        "transfer_floor_s": transfer,
        "compute_floor_s": floor,
        "over_floor": seconds / max(transfer, floor),
        "activations": "fp8" if 0 < quantize_from <= length else "fp16",
        "peak_gib": torch.cuda.max_memory_reserved(model.device) / 2**30,
    }


class _StandingStreamer:
    """Gives what it has once copied, the same to all items of a size: only computation is left."""

    def __init__(self, model: StreamedModel, layout: ModelLayout) -> None:
        self.queues = model.streamer.queues
        self._items = {item.key: item for item in layout.items}
        self._parts: dict[tuple[int, ...], list[Tensor]] = {}

    def take(self, key: tuple[int, int]) -> list[Tensor]:
        """See Streamer."""
        parts = self._items[key].parts
        sizes = tuple(part.numel() for part in parts)
        if sizes not in self._parts:
            self._parts[sizes] = [part.to(self.queues.device) for part in parts]
        return self._parts[sizes]

    def release(self) -> None:
        """See Streamer."""

    def reset(self) -> None:
        """See Streamer."""


def compute_floor(
    model: StreamedModel, layout: ModelLayout, spec: ModelSpec, batch: Batch, pages: KvPages
) -> float:
    """Seconds of all layers, were the weights there: one of each kind is timed, and multiplied."""
    streamer = model.streamer
    model.streamer = _StandingStreamer(model, layout)  # type: ignore[assignment]
    total = 0.0
    try:
        hidden = model.embed(batch.token_ids)
        is_routed = [isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers]
        for kind in set(is_routed):
            seconds = []
            for _ in range(3):
                torch.cuda.synchronize(model.device)
                began_at = time.monotonic()
                model.forward_layer(is_routed.index(kind), hidden, batch, pages)
                torch.cuda.synchronize(model.device)
                seconds.append(time.monotonic() - began_at)
            total += min(seconds) * is_routed.count(kind)
    finally:
        model.streamer = streamer
    return total


def batch_of(spec: ModelSpec, length: int) -> Batch:
    """One prompt of random tokens."""
    tokens = torch.randint(spec.vocab_size, (length,), generator=torch.Generator().manual_seed(2))
    blocks = range(-(-length // BLOCK_TOKENS))
    return Batch.build([SequenceChunk(tokens.tolist(), 0, blocks)], BLOCK_TOKENS)


def pages_for(spec: ModelSpec, length: int) -> KvPages:
    """Pages that hold it."""
    return KvPages.allocate(
        KvLayout.of(spec, num_blocks=-(-length // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS)
    )


def experts_of(spec: ModelSpec, weights: RandomModel) -> Tensor:
    """The largest tensor of the first routed layer, as bytes."""
    index = [isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers].index(True)
    return weights.tensor(f"layers.{index}.experts.gate_up").view(-1).view(torch.uint8)


def _trials(spec: ModelSpec, device: torch.device) -> dict[str, float]:
    attention = spec.layers[0].attention
    if isinstance(attention, MlaSpec):
        dims = attention.nope_dim + attention.rope_dim, attention.v_dim
    else:
        dims = attention.head_dim, attention.head_dim
    return {
        f"{backend.name}{' padded' * is_padded}": 1e3 * seconds
        for (backend, is_padded), seconds in trial_seconds(*dims, device).items()
    }
