"""Hybrid decoding at a published shape: the step against DRAM, the hand-over, two micro-batches."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import FP8
from headwater.bench.timing import ReadProbe, stolen_seconds
from headwater.gpu.device import find_gpu, give_back
from headwater.gpu.dual_batch import DualBatchPolicy, micro_batches
from headwater.gpu.hybrid_decoder import HybridDecoder
from headwater.gpu.lane import Lane
from headwater.gpu.mailbox import ExpertWorker, Pending, StoredExperts, add_and_norm, ask
from headwater.gpu.resident import Norm, ResidentGate
from headwater.kernels import WorkerPool, isa, self_test
from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_HAND_OVERS = 64
# Of each way to run a step; the first ones compile and capture.
_WARM_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS = 3, 43, 103
_SECONDS_EACH = 6.0
# Of a batch: other machines' use of the memory changes within seconds.
_LEAST_STEPS, _MOST_STEPS, _STEPS_SECONDS = 18, 103, 12.0
_LEAST_QUIET = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """A published shape with other numbers: `layers`, routed ones among them, of which `distinct`
    differ; experts per token and their width; experts, and heads of keys and values."""

    name: str = "deepseek-v3"
    layers: int | None = None
    distinct: int = 2
    choices: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    kv_heads: int | None = None

    def spec(self) -> ModelSpec:
        """The model with FP8 weights."""
        config = make_config(self.name, layers=self.layers, experts=self.experts)
        config |= {"quantization_config": FP8}
        for field, value in (
            ("num_experts_per_tok", self.choices),
            ("moe_intermediate_size", self.intermediate),
            ("num_key_value_heads", self.kv_heads),
        ):
            if value is not None:
                config[field] = value
        return ModelSpec.from_config(config, "config.json")


@contextmanager
def workers(spare_cpus: int = 0) -> Iterator[WorkerPool]:
    """A pool on all CPUs, as decode has it, or on all but some, and the calling thread on those.

    That thread sleeps while the GPU computes.
    """
    # Torch's threads would wait for each other on the few CPUs that are left.
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0)
    pool = WorkerPool(max(1, len(allowed) - spare_cpus))
    os.sched_setaffinity(0, allowed - set(pool.cpus) or allowed)
    try:
        yield pool
    finally:
        os.sched_setaffinity(0, allowed)


def bench_hybrid(
    shape: Shape,
    batches: Sequence[int],
    context: int,
    spare_cpus: int,
    *,
    in_huge_pages: bool = True,
    say: Callable[[str], None] = print,
) -> Iterator[dict[str, Any]]:
    """One row per batch at `context` tokens; before it, the hand-over alone."""
    self_test()
    gpu, spec = find_gpu(0), shape.spec()
    weights = RandomModel(spec, shape.distinct, in_huge_pages=in_huge_pages)
    with workers(spare_cpus) as pool, torch.inference_mode():
        probe = ReadProbe(pool)
        yield hand_over(spec, weights, pool, gpu.device)
        decoder = HybridDecoder(
            spec,
            weights,
            pool,
            gpu.device,
            max_rows=max(batches),
            max_context=max(context, 256),
        )
        # Zeros would be read faster, and attention would add nothing to hidden states.
        decoder.cache.uniform_(-1, 1)
        say(f"{torch.cuda.memory_allocated(gpu.device) / 2**30:.1f} GiB on the device")
        for batch in batches:
            yield _row(
                shape, spec, decoder, batch, context, _time_steps(decoder, batch, context, probe)
            )


def bench_dual(cases: Mapping[Shape, Sequence[tuple[int, int]]]) -> Iterator[dict[str, Any]]:
    """A row per shape and (rows, context): one batch against two micro-batches."""
    self_test()
    gpu = find_gpu(0)
    for shape, sizes in cases.items():
        spec = shape.spec()
        weights = RandomModel(spec, shape.distinct)
        with workers(1) as pool, torch.inference_mode():
            for rows, context in sizes:
                decoder = HybridDecoder(
                    spec, weights, pool, gpu.device, max_rows=rows, max_context=context, lanes=2
                )
                # Zeros would be read faster.
                decoder.cache.uniform_(-1, 1)
                yield {
                    "what": "dual_batch",
                    "shape": str(shape),
                    "rows": rows,
                    "context": context,
                } | _compare_ways(decoder, rows, context)
                # Its steps know it, so that it goes when it is looked for.
                del decoder
                give_back()


def hand_over(
    spec: ModelSpec, weights: RandomModel, pool: WorkerPool, device: torch.device
) -> dict[str, Any]:
    """What it adds to a layer that the experts are on the CPU, beside what they compute there.

    The kernels of a step that have a part in it (norm and inputs; gate, choice and ticket; answer)
    in a CUDA graph, less what the CPU computes, against the same kernels with all of it in the
    device's memory and nobody to wait for.
    """
    from headwater.gpu.kernels.gating import choose

    index = [isinstance(layer.ffn, MoeFfnSpec) for layer in spec.layers].index(True)
    ffn = spec.layers[index].ffn
    assert isinstance(ffn, MoeFfnSpec)
    experts = StoredExperts(weights, index, ffn, pool)
    lane, local = (Lane(1, spec.hidden_size, ffn.experts_per_token, device) for _ in range(2))
    for name in ("x", "experts", "weights", "output"):
        setattr(local, name, getattr(local, name).to(device))
    worker = ExpertWorker(pool, [experts], [lane])
    norm = Norm(torch.ones(spec.hidden_size, device=device), spec.norm_eps)
    weight = weights.tensor(f"layers.{index}.gate").to(device).float()
    bias = torch.zeros(ffn.num_experts, device=device) if ffn.has_bias else None
    gate = ResidentGate(ffn, weight, bias)
    hidden = torch.randn(1, spec.hidden_size, device=device)

    def step(place: Lane) -> None:
        for _ in range(_HAND_OVERS):
            normal, _ = add_and_norm(hidden, Pending(), norm, is_kept=True)
            assert normal is not None
            if place is lane:
                ask(place, 0, gate, normal)
                add_and_norm(hidden, Pending(None, place, 0), norm)
            else:
                choose(gate, normal, place, 0, is_posted=False)
                add_and_norm(hidden, Pending(place.output[None]), norm)

    worker.open(0, 1)
    found = {}
    for name, place in (("with", lane), ("without", local)):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            step(place)
            stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step(place)
        times = []
        for _ in range(7):
            busy, began_at = worker.busy_seconds, time.perf_counter()
            with torch.cuda.stream(stream):
                graph.replay()
                stream.synchronize()
            taken = time.perf_counter() - began_at
            times.append((taken - (worker.busy_seconds - busy)) / _HAND_OVERS)
        found[name] = 1e6 * statistics.median(times)
    worker.close(0)
    return {
        "what": "hand_over",
        "us_per_layer": found["with"] - found["without"],
        "with_its_kernels_us": found["with"],
        "kernels_alone_us": found["without"],
    }


@dataclass(frozen=True, slots=True)
class _Read:
    """What memory gives, and what had been stolen from this machine before and after."""

    gb_per_s: float
    stolen_before: float
    stolen_after: float


def _read(probe: ReadProbe) -> _Read:
    before = stolen_seconds()
    return _Read(probe.gb_per_s(), before, stolen_seconds())


@dataclass(frozen=True, slots=True)
class _Step:
    """Seconds of a step and of the CPU's part in it, and GB/s of reads just before and after.

    In a quiet one and the reads around it the hypervisor took no time for others. A core that it
    takes away for a millisecond is waited for by all the others, in most steps on a busy machine,
    but hardly ever in a read, which is twenty times as short.
    """

    seconds: float
    cpu_seconds: float
    read_gb_per_s: float
    is_quiet: bool


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps in a row. `best_gb_per_s` is the fastest read: what memory does while nobody else uses
    it. `fetched_bytes` were read ahead in a step; `right_share` of the likeliest experts were
    chosen.
    """

    steps: list[_Step]
    best_gb_per_s: float
    fetched_bytes: float
    right_share: float


def _time_steps(decoder: HybridDecoder, rows: int, context: int, probe: ReadProbe) -> _Steps:
    """Steps and the probe in turn, so that both see the same moments."""
    parts = micro_batches(rows, is_dual=False)
    positions = torch.full((rows,), context - 1)
    worker = decoder.worker
    assert worker is not None
    generator = torch.Generator().manual_seed(rows)
    times: list[tuple[float, float]] = []
    counts: list[tuple[int, int, int]] = []
    began = time.perf_counter()
    reads = [_read(probe)]
    while len(times) < _LEAST_STEPS or (
        len(times) < _MOST_STEPS and time.perf_counter() - began < _STEPS_SECONDS
    ):
        tokens = torch.randint(decoder.spec.vocab_size, (rows,), generator=generator)
        busy, began_at = worker.busy_seconds, time.perf_counter()
        logits = decoder.logits(decoder.step(parts, tokens, positions)[0])
        times.append((time.perf_counter() - began_at, worker.busy_seconds - busy))
        counts.append((worker.fetched_bytes, worker.num_predicted, worker.num_right))
        reads.append(_read(probe))
    assert bool(torch.isfinite(logits).all()), "the step gave no numbers"
    steps = [
        _Step(
            *both,
            read_gb_per_s=(before.gb_per_s + after.gb_per_s) / 2,
            is_quiet=after.stolen_after == before.stolen_before,
        )
        for before, both, after in zip(reads, times, reads[1:], strict=False)
    ]
    # The first ones compile and capture.
    steps = steps[_WARM_ROUNDS:]
    fetched, predicted, right = (
        last - first for first, last in zip(counts[_WARM_ROUNDS - 1], counts[-1], strict=True)
    )
    best = max(read.gb_per_s for read in reads)
    return _Steps(steps, best, fetched / len(steps), right / max(1, predicted))


def _compare_ways(decoder: HybridDecoder, rows: int, context: int) -> dict[str, Any]:
    """Merged, dual and as the policy decides, in turn, so that all see the same moments."""
    assert decoder.worker is not None
    policy, positions = DualBatchPolicy(), torch.full((rows,), context - 1)
    generator = torch.Generator().manual_seed(rows)
    bound = decoder.bound(context)
    seconds: dict[str, list[float]] = {"merged": [], "dual": [], "policy": []}
    busy: dict[str, list[float]] = {name: [] for name in seconds}
    rounds = num_dual = 0
    began = time.perf_counter()
    while rounds < _LEAST_ROUNDS or (
        rounds < _MOST_ROUNDS and time.perf_counter() - began < _SECONDS_EACH
    ):
        for way, times in seconds.items():
            is_dual = policy.is_dual(rows, bound) if way == "policy" else way == "dual"
            tokens = torch.randint(decoder.spec.vocab_size, (rows,), generator=generator)
            before, began_at = decoder.worker.busy_seconds, time.perf_counter()
            hidden, _ = decoder.step(micro_batches(rows, is_dual=is_dual), tokens, positions)
            decoder.logits(hidden)
            taken = time.perf_counter() - began_at
            if rounds < _WARM_ROUNDS:
                continue
            times.append(taken)
            busy[way].append(decoder.worker.busy_seconds - before)
            if way == "policy":
                policy.observe(rows, bound, taken, is_dual=is_dual)
                num_dual += is_dual
        rounds += 1
    merged, dual, chosen = (statistics.fmean(times) for times in seconds.values())
    middle = [statistics.median(seconds[way]) for way in ("merged", "dual")]
    return {
        "steps": len(seconds["dual"]),
        "merged_ms": 1e3 * middle[0],
        "dual_ms": 1e3 * middle[1],
        "cpu_ms_merged": 1e3 * statistics.median(busy["merged"]),
        "cpu_ms_dual": 1e3 * statistics.median(busy["dual"]),
        "speedup": middle[0] / middle[1],
        "policy_over_better": chosen / min(merged, dual),
        "policy_dual_steps": num_dual,
        # What neither way can do without: the CPU's part, and the GPU's of one batch.
        "gpu_ms_merged": 1e3 * (middle[0] - statistics.median(busy["merged"])),
    }


def _row(
    shape: Shape,
    spec: ModelSpec,
    decoder: HybridDecoder,
    batch: int,
    context: int,
    steps: _Steps,
) -> dict[str, Any]:
    num_experts = max(la.ffn.num_experts for la in spec.layers if isinstance(la.ffn, MoeFfnSpec))
    chosen = max(la.ffn.experts_per_token for la in spec.layers if isinstance(la.ffn, MoeFfnSpec))
    # Tokens choose as if by chance, so that some share experts.
    distinct = num_experts * (1 - (1 - chosen / num_experts) ** batch) / chosen
    expert_gb = decoder.expert_bytes * distinct / 1e9
    quiet = [step for step in steps.steps if step.is_quiet]
    seconds, cpu_seconds, read_gb_per_s = (
        statistics.median(getattr(step, field) for step in steps.steps)
        for field in ("seconds", "cpu_seconds", "read_gb_per_s")
    )
    return {
        "what": "hybrid",
        "shape": str(shape),
        "batch": batch,
        "context": context,
        "isa": isa(),
        "step_ms": 1e3 * seconds,
        "cpu_ms": 1e3 * cpu_seconds,
        "rest_us_per_layer": 1e6 * (seconds - cpu_seconds) / spec.num_layers,
        "expert_gb": expert_gb,
        "read_gb_per_s": read_gb_per_s,
        "best_read_gb_per_s": steps.best_gb_per_s,
        "roofline_ratio": _share_of_reads(steps.steps, expert_gb, "seconds"),
        "cpu_ratio": _share_of_reads(steps.steps, expert_gb, "cpu_seconds"),
        "steps": len(steps.steps),
        "quiet_steps": len(quiet),
        "quiet_roofline_ratio": _share_of_reads(quiet, expert_gb, "seconds"),
        "quiet_cpu_ratio": _share_of_reads(quiet, expert_gb, "cpu_seconds"),
        "fetched_mb_per_layer": steps.fetched_bytes / spec.num_layers / 1e6,
        "right_share": steps.right_share,
        "tokens_per_s": batch / seconds,
    }


def _share_of_reads(steps: Sequence[_Step], expert_gb: float, field: str) -> float | None:
    """Of what memory gave around a step, the median; None if there are too few to tell."""
    if len(steps) < _LEAST_QUIET:
        return None
    shares = [expert_gb / (step.read_gb_per_s * getattr(step, field)) for step in steps]
    return float(statistics.median(shares))
