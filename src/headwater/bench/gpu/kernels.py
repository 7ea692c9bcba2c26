"""The grouped products at DeepSeek-V3's shape: TFLOP/s by rows per expert, for tiles of choice."""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
import triton

from headwater.gpu import kernels
from headwater.gpu.kernels import grouped, table
from headwater.gpu.kernels.expansion import expand
from headwater.gpu.kernels.experts import FP8_BLOCK, ExpertStack, Rows, Tiles, cut_into_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

EXPERTS, HIDDEN, INTERMEDIATE = 6, 7168, 2048


def bench_products(
    rows_each: Sequence[int],
    configs: Iterable[tuple[int, table.TileConfig]],
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """A row for each tile (its height and shape), way to multiply and rows per expert."""
    stack = _random_stack(device)
    expanded = expand(stack)
    num_bytes = 3 * EXPERTS * HIDDEN * INTERMEDIATE
    read_and_written = num_bytes * 3 / _seconds(lambda: expand(stack)) / 1e9
    yield {"way": "expanding", "gb_per_s": read_and_written}
    for height, config in configs:
        for way, weights in (("W8A16", stack), ("expanded", expanded), ("W8A8", stack)):
            for count in rows_each:
                is_quantized = way == "W8A8"
                figures = _measure(
                    weights, count, height, config, device, is_quantized=is_quantized
                )
                yield {
                    "rows": count,
                    "tile": f"{height} x {config.block_n}, {config.warps} warps, {config.stages}",
                    "way": way,
                } | figures


def _random_stack(device: torch.device) -> ExpertStack:
    def codes(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, device=device) * 100
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device) / 1e4

    return ExpertStack.of(
        {
            "gate_up": codes(EXPERTS, 2, INTERMEDIATE, HIDDEN),
            "gate_up.scale": scales(EXPERTS, 2, INTERMEDIATE // 128, HIDDEN // 128),
            "down": codes(EXPERTS, HIDDEN, INTERMEDIATE),
            "down.scale": scales(EXPERTS, HIDDEN // 128, INTERMEDIATE // 128),
        }
    )


def _measure(
    stack: ExpertStack,
    count: int,
    height: int,
    config: table.TileConfig,
    device: torch.device,
    *,
    is_quantized: bool,
) -> dict[str, Any]:
    num_rows = EXPERTS * count
    found, _ = cut_into_tiles([count] * EXPERTS, [EXPERTS], height, num_rows + -num_rows % height)
    tiles = Tiles(torch.from_numpy(found).to(device), 0, num_rows, height)
    x = torch.randn(num_rows, HIDDEN, device=device).half()
    values, scale = kernels.quantize(x) if is_quantized else (x, None)
    rows = Rows(values, scale, torch.randperm(num_rows, device=device).int())
    act = torch.empty(num_rows, INTERMEDIATE, device=device)
    if is_quantized:
        middle = Rows(act.to(torch.float8_e4m3fn), torch.empty(num_rows, 16, device=device))
    else:
        middle = Rows(act.half())
    out = torch.empty(num_rows, HIDDEN, device=device)
    flops = 2.0 * num_rows * HIDDEN * INTERMEDIATE
    figures: dict[str, Any] = {}
    products: dict[str, tuple[float, Callable[[], None]]] = {
        "gate_up": (2 * flops, lambda: grouped.gate_up(rows, stack, tiles, middle, config)),
        "down": (flops, lambda: grouped.down(middle, stack, tiles, out, config)),
    }
    for name, (operations, run) in products.items():
        # Activations' scales are as wide as a tile of gate and up.
        if is_quantized and name == "gate_up" and config.block_n != FP8_BLOCK:
            continue
        try:
            figures[f"{name}_tflop_per_s"] = operations / _seconds(run) / 1e12
        except (RuntimeError, triton.runtime.errors.OutOfResources) as refusal:
            figures[f"{name}_problem"] = str(refusal)[:60]
    return figures


def _seconds(run: Callable[[], object], rounds: int = 7) -> float:
    run()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
