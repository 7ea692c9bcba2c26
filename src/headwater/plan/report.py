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
        if num_gpus and not sweep_tokens:
            break
        threshold = quantize_from(model, machine) if num_gpus else 0
        decode_gpus = num_gpus if has_decode else 0
        prompts = [
            {"tokens": tokens}
            | _with_rate(
                prompt_time(
                    model,
                    machine,
                    tokens,
                    num_gpus=num_gpus,
                    sweep_tokens=sweep_tokens or _MOST_SWEEP_TOKENS,
                    quantize_from=threshold,
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
                "prompts": prompts,
                "steps": steps,
                "two_streams_per_s": two_streams_per_second(
                    model, machine, _CONTEXT, num_gpus=decode_gpus
                ),
                "quantize_from": threshold,
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
) -> tuple[list[DeviceMemory], int, bool]:
    """Host and GPUs; the tokens of a sweep that fit beside decode, 0 when none do; and whether
    the first GPU has room for decode."""
    has_decode = False
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
    sweep_tokens = _MOST_SWEEP_TOKENS
    per_layer = model.expert_bytes / max(1, model.num_routed)
    dense = (model.streamed_bytes - model.expert_bytes) / model.num_layers
    for index, gpu in enumerate(machine.gpus):
        vram, problem = gpu.vram_gib * _GIB, ""
        decode_weights = decode_kv = taken = 0.0
        if index == 0:
            try:
                plan = plan_decode(
                    spec,
                    model.resident_bytes,
                    int(_DECODE_SHARE * vram),
                    wanted_rows=_WANTED_ROWS,
                    wanted_context=spec.max_context_tokens,
                )
                decode_weights = plan.weight_bytes
                decode_kv = plan.cache_bytes + plan.scratch_bytes
                taken = plan.total_bytes
                has_decode = True
            except ResourceError as error:
                problem = f"answers on the CPU: {error}"
        left = vram - taken
        # Half a layer of experts and two layers of the rest, at least.
        least = fixed_bytes(spec) + per_layer / 2 + 2 * dense
        tokens = int((left - least) // token_bytes(spec))
        if tokens < _LEAST_SWEEP_TOKENS:
            problem = f"prompts on the CPU: {(least - left) / _GIB:.1f} GiB are missing"
            tokens = 0
        sweep_tokens = min(sweep_tokens, tokens)
        rows.append(
            DeviceMemory(
                f"GPU {index}: {gpu.name}",
                gpu.vram_gib,
                decode_weights / _GIB,
                decode_kv / _GIB,
                (least + min(tokens, _MOST_SWEEP_TOKENS) * token_bytes(spec)) / _GIB,
                problem,
            )
        )
    return rows, sweep_tokens, has_decode
