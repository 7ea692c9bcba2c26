"""The Triton kernels in Triton's interpreter against the reference: run by test_kernels.py.

A process of its own, since the interpreter is chosen when Triton is first imported. Prints a line
per case: name and relative error. On a GPU, `python -m tests.gpu.kernel_cases cuda` compiles them.
"""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton import knobs

from headwater.gpu.attention_check import attention_error
from headwater.gpu.cached_attention import CacheShape
from headwater.gpu.decode_attention import Angles
from headwater.gpu.kernels import (
    activations,
    combine,
    decode_steps,
    expansion,
    few_rows,
    gating,
    grouped,
    reference,
)
from headwater.gpu.kernels.experts import ExpertStack, Format, Rows, Tiles, cut_into_tiles
from headwater.gpu.kernels.handover import add_and_norm
from headwater.gpu.kernels.table import EXPANDED_FROM
from headwater.gpu.lane import Lane
from headwater.gpu.resident import Norm, ResidentGate
from headwater.model.expand import rows_of
from headwater.model.layer_spec import GqaSpec, MlaSpec, MoeFfnSpec, RopeSpec
from tests.gpu.samples import random_stack, relative_error

TOKENS, CHOICES = 24, 2
# One expert without a row, one with one, one with more than a tile.
COUNTS = (0, 1, 26, 21)
# The latent form, twice, and the other one; none fills its blocks.
CACHES = {
    "latents": CacheShape(1, 24, 8, 24, 0),
    "many latents": CacheShape(1, 260, 8, 260, 0),
    "heads": CacheShape(3, 20, 0, 20, 60),
}
SHAPES = {"plain": (128, 160, 1), "ragged": (72, 96, 1), "shards": (256, 128, 2)}


def _let_loops_end_at_loaded_numbers() -> None:
    """Triton 3.6's interpreter takes a number of one dimension for one of none, as numpy did."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def cases(device: torch.device) -> Iterator[tuple[str, float]]:
    """Every kernel, format and awkward shape."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, 200, generator=generator)
    yield "quantize", _quantized(x, device)
    for fmt, has_zeros, is_quantized, shape in _combinations():
        intermediate, hidden, shards = SHAPES[shape]
        stack = random_stack(
            fmt, len(COUNTS), shards, intermediate, hidden, generator, has_zeros=has_zeros
        )
        name = f"{fmt}{' zeros' * has_zeros}{' quantized' * is_quantized} {shape}"
        x = torch.randn(TOKENS, hidden, generator=generator)
        yield from _products(name, x, stack, device, is_quantized=is_quantized)
        if not is_quantized:
            yield f"expand {name}", _expanded(stack, device)
            tall = reference.expand(stack)
            yield from _products(f"tall {name}", x, tall, device, EXPANDED_FROM, is_quantized=False)
    for tokens in (1, 17):
        yield f"few_rows {tokens}", _few(tokens, generator, device)
    yield "add_weighted", _combined(generator, device)
    yield "add_and_norm", _normed(generator, device)
    for kind in ("softmax", "sigmoid_bias_group"):
        for tokens in (1, 9):
            yield f"choose {kind} {tokens}", _chosen(kind, tokens, generator, device)
        for tokens in (1, 3):
            _predict(kind, tokens, generator, device)
    for name, cache in CACHES.items():
        # Enough of them for programs of several tiles.
        for rows in (3, 40):
            error = attention_error(cache, 2 * cache.kv_heads, rows, 220, device)
            yield f"attend {name} {rows}", error
    yield "values", _values(generator, device)
    for is_interleaved in (False, True):
        name = "interleaved" if is_interleaved else "halves"
        yield from _mla(name, is_interleaved, generator, device)
        yield from _gqa(name, is_interleaved, generator, device)


def _combinations() -> Iterator[tuple[Format, bool, bool, str]]:
    formats: tuple[tuple[Format, bool, bool], ...] = (
        ("fp16", False, False),
        ("bf16", False, False),
        ("fp8", False, False),
        ("fp8", False, True),
        ("int4", False, False),
        ("int4", True, False),
        ("mxfp4", False, False),
    )
    for (fmt, has_zeros, is_quantized), shape in itertools.product(formats, SHAPES):
        if fmt in ("int4", "mxfp4") and shape == "ragged":
            continue  # four-bit groups divide the columns
        yield fmt, has_zeros, is_quantized, shape


def _products(
    name: str,
    x: Tensor,
    stack: ExpertStack,
    device: torch.device,
    height: int = 16,
    *,
    is_quantized: bool,
) -> Iterator[tuple[str, float]]:
    """Both products of a piece that starts in the middle of the sorted rows."""
    num_rows = sum(COUNTS)
    table, (piece,) = cut_into_tiles(COUNTS, [len(COUNTS)], height, max(64, height))
    first = 3
    index = torch.arange(first + num_rows) * 7 % TOKENS
    tiles = Tiles(
        torch.from_numpy(table) + torch.tensor([[0], [first], [first]]), first, 48, height
    )
    tiles = Tiles(tiles.table.int(), first, piece.end_row, height)
    values, scale = reference.quantize(x) if is_quantized else (x.half(), None)
    rows = Rows(values, scale, index.int())
    width = stack.gate_up.rows * stack.gate_up.num_shards
    expected = Rows(torch.full((num_rows, width), float("nan")))
    reference.gate_up(rows, stack, tiles, expected)
    ours = Rows(torch.full_like(expected.values, float("nan"), device=device))
    on_device = ExpertStack(*(_move(s, device) for s in (stack.gate_up, stack.down)))
    moved_tiles = Tiles(tiles.table.to(device), first, tiles.num_rows, height)
    grouped.gate_up(_move(rows, device), on_device, moved_tiles, ours)
    yield f"gate_up {name}", relative_error(ours.values.cpu(), expected.values)

    act = expected.values.half()
    if is_quantized:
        blocks = stack.gate_up.num_shards * -(-stack.gate_up.rows // 128)
        quantized = Rows(
            torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(num_rows, blocks, device=device),
        )
        grouped.gate_up(_move(rows, device), on_device, moved_tiles, quantized)
        reference_rows = Rows(
            torch.empty(num_rows, width, dtype=torch.float8_e4m3fn),
            torch.empty(num_rows, blocks),
        )
        reference.gate_up(rows, stack, tiles, reference_rows)
        assert quantized.scale is not None
        assert reference_rows.scale is not None
        yield f"scales {name}", relative_error(quantized.scale.cpu(), reference_rows.scale)
        inputs = reference_rows
    else:
        inputs = Rows(act)
    out = torch.full((num_rows, x.shape[1]), float("nan"))
    reference.down(inputs, stack, tiles, out)
    mine = torch.full_like(out, float("nan"), device=device)
    grouped.down(_move(inputs, device), on_device, moved_tiles, mine)
    yield f"down {name}", relative_error(mine.cpu(), out)


def _expanded(stack: ExpertStack, device: torch.device) -> float:
    ours = expansion.expand(ExpertStack(*(_move(s, device) for s in (stack.gate_up, stack.down))))
    theirs = reference.expand(stack)
    return max(
        relative_error(a.values.cpu(), b.values)
        for a, b in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down))
    )


def _quantized(x: Tensor, device: torch.device) -> float:
    """The scales must agree; the interpreter cuts off where a GPU rounds, so values need not."""
    values, scale = activations.quantize(x.to(device))
    _, expected_scale = reference.quantize(x)
    assert relative_error(scale.cpu(), expected_scale) < 1e-6
    wide = scale.cpu().repeat_interleave(128, dim=1)[:, : x.shape[1]]
    return relative_error(values.cpu().float() * wide, x)


def _few(tokens: int, generator: torch.Generator, device: torch.device) -> float:
    """A weight that is neither a multiple of the kernel's rows nor of the scales' blocks."""
    stack = random_stack("fp8", 1, 1, 200, 340, generator).gate_up
    values, scale = stack.values[0, 0, 1], stack.scale[0, 0, 1] if stack.scale is not None else None
    assert scale is not None
    x = torch.randn(tokens, 340, generator=generator).half()
    expected = torch.empty(200, 340)
    rows_of(values, scale, None).expand(0, expected)
    pieces = few_rows.few_rows_pieces(x.to(device), values.to(device), scale.to(device))
    return relative_error(pieces.sum(dim=0).cpu(), x.float() @ expected.t())


def _combined(generator: torch.Generator, device: torch.device) -> float:
    hidden = torch.randn(TOKENS, 40, generator=generator)
    outputs = torch.randn(20, 40, generator=generator).bfloat16()
    places = torch.randperm(TOKENS * CHOICES, generator=generator).view(TOKENS, CHOICES).int()
    weights = torch.rand(TOKENS, CHOICES, generator=generator)
    ours = hidden.clone().to(device)
    combine.add_weighted(ours, outputs.to(device), places.to(device), weights.to(device), first=5)
    reference.add_weighted(hidden, outputs, places, weights, 5)
    return relative_error(ours.cpu(), hidden)


def _normed(generator: torch.Generator, device: torch.device) -> float:
    hidden = torch.randn(3, 40, generator=generator)
    pieces = torch.randn(2, 3, 40, generator=generator)
    weight = torch.rand(40, generator=generator)
    ours = hidden.clone().to(device)
    norm = Norm(weight.to(device), 1e-6)
    _, rounded = add_and_norm(ours, pieces.to(device), None, norm, is_kept=False)
    expected = hidden + pieces.sum(dim=0)
    assert rounded is not None
    normal = functional.rms_norm(expected, (40,), weight, 1e-6)
    assert relative_error(rounded.cpu().float(), normal) < 1e-3
    add_and_norm(ours, pieces.to(device), None, None, is_kept=False)
    return relative_error(ours.cpu(), expected + pieces.sum(dim=0))


def _values(generator: torch.Generator, device: torch.device) -> float:
    spec = MlaSpec(3, None, 150, 12, 8, 20, 0.3, RopeSpec("default", 8, 100.0))
    latents = torch.randn(18, 3, 150, generator=generator)
    values = torch.randn(3, 150, 20, generator=generator).half()
    ours = decode_steps.mla_values(spec, latents.to(device), values.to(device)).cpu().float()
    expected = torch.einsum("thr,hrv->thv", latents, values.float()).flatten(1)
    # What is given out is FP16.
    return max(0.0, relative_error(ours, expected) - 1e-3)


def _gate(kind: str, generator: torch.Generator) -> ResidentGate:
    """40 experts, six of which are chosen, for 24 columns."""
    is_sigmoid = kind == "sigmoid_bias_group"
    spec = MoeFfnSpec(
        num_experts=40,
        experts_per_token=6,
        intermediate_size=8,
        gate="sigmoid_bias_group" if is_sigmoid else "softmax",
        is_normalized=is_sigmoid,
        routed_scale=2.5,
        num_groups=8 if is_sigmoid else 1,
        groups_per_token=3 if is_sigmoid else 1,
    )
    weight = torch.randn(40, 24, generator=generator) / 5
    bias = torch.randn(40, generator=generator) / 10 if is_sigmoid else None
    return ResidentGate(spec, weight, bias)


def _moved(gate: ResidentGate, device: torch.device) -> ResidentGate:
    bias = None if gate.bias is None else gate.bias.to(device)
    return ResidentGate(gate.spec, gate.weight.to(device), bias)


def _predict(kind: str, tokens: int, generator: torch.Generator, device: torch.device) -> None:
    gate = _gate(kind, generator)
    hidden = 3 * torch.randn(tokens, 24, generator=generator)
    norm = Norm(1 + torch.randn(24, generator=generator) / 5, 1e-6)
    lane = Lane(tokens, 24, 6, device)
    moved = Norm(norm.weight.to(device), norm.eps)
    gating.predict(_moved(gate, device), hidden.to(device), moved, lane, 0, is_posted=False)
    expected, _ = gate(norm(hidden))
    # What the step itself uses is left alone.
    assert torch.equal(lane.predictions.cpu(), expected.int()), "other experts"
    assert not bool(lane.arrivals.any()), "not ready for the next layer"
    assert not any(bool(part.any()) for part in (lane.x, lane.experts, lane.weights, lane.count))


def _chosen(kind: str, tokens: int, generator: torch.Generator, device: torch.device) -> float:
    gate = _gate(kind, generator)
    normal = torch.randn(tokens, 24, generator=generator)
    lane = Lane(tokens, 24, 6, device)
    gating.choose(_moved(gate, device), normal.to(device), lane, 0, is_posted=False)
    assert not bool(lane.arrivals.any()), "not ready for the next layer"
    assert torch.equal(lane.x, normal), "other inputs"
    expected_experts, expected = gate(normal)
    assert torch.equal(lane.experts, expected_experts.int()), "other experts"
    return relative_error(lane.weights, expected)


def _mla(
    name: str, is_interleaved: bool, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[str, float]]:
    """Compressed queries, cache entry and queries of two tokens at different positions."""
    rope = RopeSpec("default", 8, 100.0, is_interleaved)
    spec = MlaSpec(3, 20, 24, 12, 8, 16, 0.3, rope)
    angles = Angles(rope, 16, torch.device("cpu"))
    moved = angles.cos.to(device), angles.sin.to(device)
    positions = torch.tensor([5, 9])
    norms = torch.rand(20, generator=generator), torch.rand(24, generator=generator)
    pieces = torch.randn(2, 2, 20 + 24 + 8, generator=generator)
    cache = torch.zeros(2, 16, 32, device=device)
    low = decode_steps.mla_inputs(
        spec, pieces.to(device), (norms[0].to(device), norms[1].to(device)), moved,
        positions.to(device), cache, 1e-6,
    )  # fmt: skip
    q, latent, k_rope = pieces.sum(dim=0).split([20, 24, 8], dim=-1)
    expected = functional.rms_norm(q, (20,), norms[0], 1e-6)
    yield f"mla compressed {name}", relative_error(low.cpu().float(), expected)
    rotated = angles.rotate(k_rope[:, None], positions)[:, 0]
    entry = torch.cat((functional.rms_norm(latent, (24,), norms[1], 1e-6), rotated), dim=-1)
    yield f"mla entry {name}", relative_error(cache.cpu()[[0, 1], positions], entry)
    pieces = torch.randn(2, 2, 3 * 20, generator=generator)
    keys = torch.randn(3, 12, 24, generator=generator).half()
    queries = decode_steps.mla_queries(
        spec, pieces.to(device), keys.to(device), moved, positions.to(device)
    ).cpu()
    heads = pieces.sum(dim=0).view(2, 3, 20) * 0.3
    absorbed = torch.einsum("thn,hnr->thr", heads[..., :12], keys.float())
    yield f"mla absorbed {name}", relative_error(queries[..., :24].float(), absorbed)
    rotated = angles.rotate(heads[..., 12:], positions)
    yield f"mla rotated {name}", relative_error(queries[..., 24:].float(), rotated)


def _gqa(
    name: str, is_interleaved: bool, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[str, float]]:
    """Queries and cache entry of two tokens at different positions, with norms."""
    spec = GqaSpec(6, 2, 12, True, 0.3, RopeSpec("default", 12, 100.0, is_interleaved))
    angles = Angles(spec.rope, 16, torch.device("cpu"))
    moved = angles.cos.to(device), angles.sin.to(device)
    positions = torch.tensor([5, 9])
    norms = [Norm(torch.rand(12, generator=generator), 1e-6) for _ in range(2)]
    pieces = torch.randn(2, 2, 10 * 12, generator=generator)
    cache = torch.zeros(2, 16, 2, 2, 12, device=device)
    on_device = tuple(Norm(norm.weight.to(device), 1e-6) for norm in norms)
    queries = decode_steps.gqa_inputs(
        spec, pieces.to(device), (on_device[0], on_device[1]), moved, positions.to(device), cache
    )
    q, k, v = pieces.sum(dim=0).view(2, 10, 12).split([6, 2, 2], dim=1)
    expected = angles.rotate(norms[0](q), positions) * 0.3
    yield f"queries {name}", relative_error(queries.cpu(), expected)
    entry = torch.stack((angles.rotate(norms[1](k), positions), v), dim=1)
    yield f"gqa entry {name}", relative_error(cache.cpu()[[0, 1], positions], entry)


def _move(holder: Any, device: torch.device) -> Any:
    """A dataclass of tensors, on `device`."""
    fields = {
        name: None if (t := getattr(holder, name)) is None else t.to(device)
        for name in holder.__dataclass_fields__
    }
    return type(holder)(**fields)


if __name__ == "__main__":
    if knobs.runtime.interpret:
        _let_loops_end_at_loaded_numbers()
    for case, error in cases(torch.device(*sys.argv[1:] or ["cpu"])):
        print(f"{case}: {error:.2e}", flush=True)
