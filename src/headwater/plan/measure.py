"""This machine's rates, measured in a few seconds: reading, products, and GPUs if there are any."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from headwater.bench.moe import bench_moe
from headwater.bench.timing import ReadProbe, worker_pool
from headwater.plan.machine import Gpu, Machine
from headwater.weights.placement import memory_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

_MANY_TOKENS, _EXPERTS = 512, 8
_READS = 7
_COPY_BYTES = 1 << 28
_PRODUCT_SIZE = 8192
_FP8_CAPABILITY = (8, 9)


def measure_machine() -> Machine:
    """All cores that this process may use, and all CUDA devices that it sees."""
    threads = len(os.sched_getaffinity(0))
    with worker_pool(threads) as pool:
        probe = ReadProbe(pool)
        read = statistics.median(probe.gb_per_s() for _ in range(_READS))
    nodes = len(memory_nodes())
    many = bench_moe("qwen3-30b", "fp8", _MANY_TOKENS, threads, experts=_EXPERTS)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Machine(
        name="this machine",
        cores=threads,
        dram_gib=memory,
        dram_gb_per_s=(read / nodes,) * nodes,
        cpu_tflop_per_s=many["tflop_per_s"],
        gpus=tuple(_measure_gpu(torch.device("cuda", index)) for index in gpus),
    )


def _measure_gpu(device: torch.device) -> Gpu:
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    targets = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    link = _COPY_BYTES / _seconds(device, lambda: targets[0].copy_(host, non_blocking=True))
    # A copy reads and writes.
    memory = 2 * _COPY_BYTES / _seconds(device, lambda: targets[0].copy_(targets[1]))
    a = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
    products = 2 * _PRODUCT_SIZE**3 / _seconds(device, lambda: a @ a) / 1e12
    has_fp8 = torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    return Gpu(
        name=torch.cuda.get_device_name(device),
        vram_gib=torch.cuda.get_device_properties(device).total_memory / 2**30,
        link_gb_per_s=link / 1e9,
        memory_gb_per_s=memory / 1e9,
        bf16_tflop_per_s=products,
        # Tensor cores multiply E4M3 twice as fast.
        fp8_tflop_per_s=2 * products if has_fp8 else 0.0,
    )


def _seconds(device: torch.device, run: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        began_at = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began_at)
    return min(times)
