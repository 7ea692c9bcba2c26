"""A whole plan: prompts by length, steps by batch, memory by place, for every number of GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwater.errors import ResourceError
from headwater.gpu.decode_plan import plan_decode
from headwater.gpu.memory_plan import fixed_bytes, token_bytes
from headwater.plan.footprint import Footprint, footprint_of
from headwater.plan.predict import (
    prompt_time,
    quantize_from,
    step_time,
    two_streams_per_second,
)

if TYPE_CHECKING:
    from headwater.model.spec import ModelSpec
    from headwater.plan.machine import Machine

PROMPTS = (4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8)
_CONTEXT = 4096
_WANTED_ROWS = 16
_MOST_SWEEP_TOKENS = 65536
_LEAST_SWEEP_TOKENS = 128
# As services/decode/models.py and the KV pool share things out.
_DECODE_SHARE = 1 / 2
_POOL_CONTEXTS = 4
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What lies where, in GiB; `problem` says what does not fit, empty if all does."""

    place: str
    has_gib: float
    weights_gib: float
    kv_gib: float
    prefill_gib: float
    problem: str = ""


def make_plan(spec: ModelSpec, machine: Machine) -> dict[str, Any]:
    """Rows for each way to run: on the CPU, and with one, two, ... GPUs; ready for JSON."""
    model = footprint_of(spec)
    memory, sweep_tokens, has_decode = _memory(spec, model, machine)
    ways = []
    for num_gpus in range(len(machine.gpus) + 1):
        if num_gpus and not sweep_tokens[num_gpus]:
            break
        decode_gpus = min(1, num_gpus) if has_decode else 0
        prompts = [
            {"tokens": tokens}
            | _with_rate(
                prompt_time(
                    model,
                    machine,
                    tokens,
                    num_gpus=num_gpus,
                    sweep_tokens=sweep_tokens[num_gpus],
                ),
                tokens,
            )
            for tokens in PROMPTS
            if tokens <= spec.max_context_tokens
        ]
        steps = [
            {"batch": batch}
            | _with_rate(step_time(model, machine, batch, _CONTEXT, num_gpus=decode_gpus), batch)
            for batch in BATCHES
        ]
        ways.append(
            {
                "gpus": num_gpus,
                "sweep_tokens": sweep_tokens[num_gpus] if num_gpus else 0,
                "prompts": prompts,
                "steps": steps,
                "two_streams_per_s": two_streams_per_second(
                    model, machine, _CONTEXT, num_gpus=decode_gpus
                ),
                "quantize_from": quantize_from(model, machine) if num_gpus else 0,
            }
        )
    return {
        "machine": asdict(machine),
        "context": _CONTEXT,
        "memory": [asdict(m) for m in memory],
        "ways": ways,
    }


def _with_rate(found: Any, tokens: int) -> dict[str, float]:
    return asdict(found) | {"tokens_per_s": tokens / found.seconds}


def _memory(
    spec: ModelSpec, model: Footprint, machine: Machine
) -> tuple[list[DeviceMemory], list[int], bool]:
    """Host and GPUs; the tokens of a sweep through so many GPUs, 0 when none fit; and whether the
    last GPU, which is decode's, has room for it beside a sweep's."""
    pool = _POOL_CONTEXTS * spec.max_context_tokens * model.kv_token_bytes
    weights = model.weight_bytes
    missing = weights - machine.dram_gib * _GIB
    kv = max(0.0, min(pool, -missing / 2))
    rows = [
        DeviceMemory(
            "host",
            machine.dram_gib,
            weights / _GIB,
            kv / _GIB,
            0.0,
            f"{missing / _GIB:.0f} GiB of memory are missing" if missing > 0 else "",
        )
    ]
    per_layer = model.expert_bytes / max(1, model.num_routed)
    dense = (model.streamed_bytes - model.expert_bytes) / model.num_layers
    sweep_tokens = [_MOST_SWEEP_TOKENS]
    has_decode = False
    count = len(machine.gpus)
    left = []
    for index, gpu in enumerate(machine.gpus):
        problem = ""
        kept = (0.0, 0.0, 0.0)
        if index == count - 1:
            kept, problem = _decode_memory(spec, model, gpu.vram_gib)
            has_decode = not problem
        left.append(gpu.vram_gib * _GIB - kept[2])
        # Prompts through this many GPUs: each has half a layer of its experts, two of the rest.
        ranks = index + 1
        least = fixed_bytes(spec) + per_layer / 2 / ranks + 2 * dense
        # The first of them also computes alone.
        per_token = max(token_bytes(spec, ranks), token_bytes(spec))
        tokens = int((min(left) - least) // per_token)
        if tokens < _LEAST_SWEEP_TOKENS:
            problem = f"prompts on the CPU: {(least - min(left)) / _GIB:.1f} GiB are missing"
            tokens = 0
        sweep_tokens.append(min(tokens, _MOST_SWEEP_TOKENS))
        rows.append(
            DeviceMemory(
                f"GPU {index}: {gpu.name}",
                gpu.vram_gib,
                kept[0] / _GIB,
                kept[1] / _GIB,
                (least + sweep_tokens[-1] * per_token) / _GIB,
                problem,
            )
        )
    return rows, sweep_tokens, has_decode


def _decode_memory(
    spec: ModelSpec, model: Footprint, vram_gib: float
) -> tuple[tuple[float, float, float], str]:
    """Bytes of decode's weights, of its keys, values and scratch, and of all; or what is wrong."""
    try:
        plan = plan_decode(
            spec,
            model.resident_bytes,
            int(_DECODE_SHARE * vram_gib * _GIB),
            wanted_rows=_WANTED_ROWS,
            wanted_context=spec.max_context_tokens,
        )
    except ResourceError as error:
        return (0.0, 0.0, 0.0), f"answers on the CPU: {error}"
    kept = plan.weight_bytes, plan.cache_bytes + plan.scratch_bytes, plan.total_bytes
    return (float(kept[0]), float(kept[1]), float(kept[2])), ""
