"""How far apart results are at DeepSeek-V3's sizes: by what a recipe rounds, and by the kernels.

Owns the comparison in three steps. "recipe" is the error of the rounding itself: the published
recipe (activations in E4M3, 1 x 128 blocks, or in FP16) carried out in FP64, against FP64 without
any rounding. "kernel" is what the kernel adds: its result against the same recipe in FP64. "layer"
holds whole layers of the streamed model against the CPU's reference, each from the reference's own
input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import FP8, batch_of, pages_for
from headwater.gpu import kernels
from headwater.gpu.kernels import reference
from headwater.gpu.kernels.experts import (
    FP8_BLOCK,
    ExpertStack,
    Rows,
    Tiles,
    cut_into_tiles,
    empty_activations,
)
from headwater.gpu.layout import lay_out
from headwater.gpu.memory_plan import MemoryPlan
from headwater.gpu.prefill_model import StreamedModel
from headwater.gpu.streams import queues_on
from headwater.model.expand import rows_of
from headwater.model.spec import ModelSpec
from headwater.model.transformer import Transformer
from headwater.synth.shapes import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, INTERMEDIATE = 7168, 2048
_TILE_ROWS = 64
_SPREAD = 60.0


def bench_numerics(device: torch.device, tokens: int = 256) -> Iterator[dict[str, Any]]:
    """A row per kind of activations and recipe; then one per layer and recipe."""
    for kind in ("normal", "outliers"):
        for is_quantized in (True, False):
            yield expert_row(kind, tokens, device, is_quantized=is_quantized)
    yield from layer_rows(device, tokens)


def expert_row(
    kind: str, tokens: int, device: torch.device, *, is_quantized: bool
) -> dict[str, Any]:
    """One expert of random weights; "outliers" has channels thirty times as large as the rest."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    if kind == "outliers":
        x[:, torch.randperm(HIDDEN, generator=generator)[: HIDDEN // 500]] *= 30
    x = x.half()
    parts = _expert(generator)
    stack = ExpertStack.of({name: part.to(device) for name, part in parts.items()})
    gate, up = (_whole(parts, "gate_up", (0, i), device) for i in (0, 1))
    down = _whole(parts, "down", (0,), device)
    wide = x.to(device).double()
    exact = _network(wide, gate, up, down)
    recipe = _network(wide, gate, up, down, is_quantized=is_quantized)
    ours = _by_kernel(x.to(device), stack, is_quantized=is_quantized)
    return {
        "what": "expert",
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "inputs": kind,
        "recipe": "W8A8" if is_quantized else "W8A16",
        "recipe_error": _apart(recipe, exact),
        "kernel_error": _apart(ours, recipe),
        "total_error": _apart(ours, exact),
    }


def layer_rows(device: torch.device, tokens: int, layers: int = 4) -> Iterator[dict[str, Any]]:
    """DeepSeek-V3 with 16 experts and few layers, on `device` and by the CPU's reference."""
    config = make_config("deepseek-v3", layers=layers, experts=16) | {"quantization_config": FP8}
    spec = ModelSpec.from_config(config, "config.json")
    weights = RandomModel(spec, 2)
    batch, pages = batch_of(spec, tokens), pages_for(spec, tokens)
    cpu = Transformer(spec, weights)
    inputs = [cpu.embed(batch.token_ids)]
    for index in range(spec.num_layers):
        inputs.append(cpu.forward_layer(index, inputs[-1].clone(), batch, pages))
    for is_quantized in (True, False):
        model = StreamedModel(
            spec,
            weights,
            lay_out(spec, weights),
            MemoryPlan(2, 3, tokens, 0, 0),
            queues_on(device),
            quantize_from=int(is_quantized),
        )
        model.embed(batch.token_ids)
        for index in range(spec.num_layers):
            before, after = inputs[index], inputs[index + 1]
            found = model.forward_layer(index, before.to(device, copy=True), batch, pages).cpu()
            yield {
                "what": "layer",
                "layer": index,
                "recipe": "W8A8" if is_quantized else "W8A16",
                "hidden_error": _apart(found, after),
                "increment_error": _apart(found - before, after - before),
            }


def _expert(generator: torch.Generator) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    for name, shape in (
        ("gate_up", (1, 2, INTERMEDIATE, HIDDEN)),
        ("down", (1, HIDDEN, INTERMEDIATE)),
    ):
        *lead, rows, columns = shape
        codes = torch.randn(shape, generator=generator) * _SPREAD
        parts[name] = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        blocks = (*lead, rows // FP8_BLOCK, columns // FP8_BLOCK)
        scale = torch.rand(blocks, generator=generator) + 0.5
        parts[f"{name}.scale"] = scale * columns**-0.5 / _SPREAD
    return parts


def _whole(
    parts: dict[str, Tensor], name: str, place: tuple[int, ...], device: torch.device
) -> Tensor:
    """A matrix of the expert in FP64."""
    values = parts[name][place]
    out = torch.empty(values.shape)
    rows_of(values, parts[f"{name}.scale"][place], None).expand(0, out)
    return out.to(device).double()


def _network(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, is_quantized: bool | None = None
) -> Tensor:
    """FP64 of FP64 x; rounds to E4M3 or to FP16 what the recipe rounds, with None nothing."""
    rounded = _rounded(x, is_quantized=is_quantized)
    activated = functional.silu(rounded @ gate.t()) * (rounded @ up.t())
    return _rounded(activated, is_quantized=is_quantized) @ down.t()


def _rounded(x: Tensor, *, is_quantized: bool | None) -> Tensor:
    if is_quantized is None:
        return x
    if not is_quantized:
        return x.half().double()
    values, scale = reference.quantize(x)
    return values.double() * scale.double().repeat_interleave(FP8_BLOCK, dim=1)


def _by_kernel(x: Tensor, stack: ExpertStack, *, is_quantized: bool) -> Tensor:
    """What the product's kernels give for FP16 x: FP32 [T, hidden]."""
    count = len(x)
    table, _ = cut_into_tiles([count], [1], _TILE_ROWS, count + -count % _TILE_ROWS)
    tiles = Tiles(torch.from_numpy(table).to(x.device), 0, count, _TILE_ROWS)
    index = torch.arange(count, dtype=torch.int32, device=x.device)
    values, scale = kernels.quantize(x) if is_quantized else (x, None)
    activated = empty_activations(count, stack, x.device, is_quantized=is_quantized)
    kernels.gate_up(Rows(values, scale, index), stack, tiles, activated)
    out = torch.empty(count, HIDDEN, device=x.device)
    kernels.down(activated, stack, tiles, out)
    return out


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """L2 of the difference over L2 of `theirs`."""
    theirs = theirs.double()
    return float((ours.double() - theirs).norm() / theirs.norm())
