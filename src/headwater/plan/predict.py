"""How long prompts and steps take: pure functions of footprint and machine.

Owns the formulas and what was fitted to measurements (benchmarks/results; benchmarks/plan.py prints
the error against each): the shares below are of the rates that a Machine states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.gpu.memory_plan import EXPANDED_ABOVE

if TYPE_CHECKING:
    from headwater.plan.footprint import Footprint
    from headwater.plan.machine import Gpu, Machine

# Of large products' rates, on an H200: grouped products in FP16 and with E4M3, and attention.
_FP16_SHARE, _FP8_SHARE, _ATTENTION_SHARE = 0.54, 0.285, 0.66
# Whatever a sweep's layer takes besides: gates, sorting, launches; and expanding experts to FP16,
# at this share of the memory's rate.
_SWEEP_LAYER_SECONDS, _EXPAND_SHARE = 0.0053, 0.69
# Copies against computation: what the shorter of both adds to the longer.
_OVERLAP_LOSS = 0.065
# A link beside the others of its host; bytes that a rank exchanges per token, layer and hidden.
_JOINT_LINK_SHARE, _EXCHANGED_BYTES = 0.992, 3.0
# Of reading: routed experts, some of which are read ahead, and a whole step on the CPU.
_EXPERTS_SHARE, _CPU_STEP_SHARE = 0.99, 0.89
# GPU's part of a decode layer: kernels' own time, hand-over, and the share of memory's rate.
_DECODE_LAYER_SECONDS, _HAND_OVER_SECONDS, _GPU_READ_SHARE = 57e-6, 8e-6, 0.75
# Attention takes as long as reading the cache so often: once, but latents, which all heads share,
# are bound by products.
_KV_READS, _LATENT_READS = 1.0, 4.4
# Products in E4M3, which lose some 3 %, must be so much faster than in FP16 to be worth it.
_LEAST_GAIN = 1.25
_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class PromptTime:
    """Seconds to the last hidden state; and of copies alone, and of computing alone."""

    seconds: float
    transfer_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a decode step; CPU's experts and GPU's part follow one another."""

    seconds: float
    cpu_seconds: float
    gpu_seconds: float


def prompt_time(
    model: Footprint,
    machine: Machine,
    tokens: int,
    *,
    num_gpus: int = 1,
    sweep_tokens: int = 65536,
    quantize_from: int = 0,
) -> PromptTime:
    """A prompt of `tokens`, in as many sweeps as `sweep_tokens` demand; 0 GPUs: on the CPU."""
    pairs = tokens * (tokens + 1) / 2 * model.pair_flops
    if num_gpus == 0:
        read = model.streamed_bytes / machine.read_gb_per_s / _GIGA
        compute = (tokens * model.token_flops + pairs) / machine.cpu_tflop_per_s / _TERA
        return PromptTime(max(read, compute), read, compute)
    gpu = machine.gpus[0]
    sweeps = -(-tokens // sweep_tokens)
    is_quantized = 0 < quantize_from <= min(tokens, sweep_tokens)
    link, exchanged = gpu.link_gb_per_s, 0.0
    if num_gpus > 1:
        link *= _JOINT_LINK_SHARE
        sent = _EXCHANGED_BYTES * model.hidden_size * model.num_layers * tokens
        exchanged = sent / gpu.peer_gb_per_s / _GIGA
    dense = model.streamed_bytes - model.expert_bytes
    transfer = sweeps * (dense + model.expert_bytes / num_gpus) / link / _GIGA
    per_token = model.token_flops / _products_rate(gpu, is_quantized=is_quantized)
    attention = pairs / (_ATTENTION_SHARE * gpu.bf16_tflop_per_s * _TERA)
    compute = (tokens * per_token + attention) / num_gpus
    compute += sweeps * model.num_layers * _SWEEP_LAYER_SECONDS
    rows = min(tokens, sweep_tokens) * model.experts_per_token / max(1, model.num_experts)
    if rows > EXPANDED_ABOVE and not is_quantized:
        expanded = (model.expert_bytes + 2 * model.expert_elements) / num_gpus
        compute += sweeps * expanded / (_EXPAND_SHARE * gpu.memory_gb_per_s * _GIGA)
    longer, shorter = max(transfer, compute), min(transfer, compute)
    return PromptTime(longer + _OVERLAP_LOSS * shorter + exchanged, transfer, compute)


def step_time(
    model: Footprint, machine: Machine, batch: int, context: int, *, num_gpus: int = 1
) -> StepTime:
    """One token of each of `batch` sequences of `context` tokens; 0 GPUs: all on the CPU."""
    read = machine.read_gb_per_s * _GIGA
    kv_bytes = batch * context * model.kv_token_bytes
    chosen = model.chosen_bytes(batch)
    if num_gpus == 0:
        seconds = (chosen + model.dense_bytes + kv_bytes) / read / _CPU_STEP_SHARE
        return StepTime(seconds, seconds, 0.0)
    cpu = chosen / read / _EXPERTS_SHARE
    gpu_read = _GPU_READ_SHARE * machine.gpus[0].memory_gb_per_s * _GIGA
    gpu = model.num_layers * _DECODE_LAYER_SECONDS + model.num_routed * _HAND_OVER_SECONDS
    reads = _LATENT_READS if model.has_latents else _KV_READS
    gpu += (model.serial_bytes + reads * kv_bytes) / gpu_read
    return StepTime(cpu + gpu, cpu, gpu)


def two_streams_per_second(
    model: Footprint, machine: Machine, context: int, *, num_gpus: int = 1
) -> float:
    """Tokens per second of two sequences: one batch, or two micro-batches that take turns."""
    merged = step_time(model, machine, 2, context, num_gpus=num_gpus)
    alone = step_time(model, machine, 1, context, num_gpus=num_gpus)
    parts = alone.cpu_seconds, alone.gpu_seconds
    dual = max(2 * parts[0], 2 * parts[1], sum(parts))
    return 2 / (min(merged.seconds, dual) if num_gpus else merged.seconds)


def quantize_from(model: Footprint, machine: Machine) -> int:
    """Tokens of a sweep from which FP16 takes longer to compute than the weights to arrive.

    0: E4M3 gains too little for what it loses.
    """
    rates = [_products_rate(machine.gpus[0], is_quantized=way) for way in (False, True)]
    if rates[1] < _LEAST_GAIN * rates[0]:
        return 0
    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high) // 2
        found = prompt_time(model, machine, middle, sweep_tokens=1 << 20)
        if found.compute_seconds > found.transfer_seconds:
            high = middle
        else:
            low = middle + 1
    return low


def _products_rate(gpu: Gpu, *, is_quantized: bool) -> float:
    """Operations per second with the weights of a sweep."""
    if is_quantized and gpu.fp8_tflop_per_s:
        return _FP8_SHARE * gpu.fp8_tflop_per_s * _TERA
    return _FP16_SHARE * gpu.bf16_tflop_per_s * _TERA
