"""Compiles every Triton kernel for real cards, and starts it on a fake one, without having any.

At DeepSeek-V3's sizes. Run by test_kernels.py in a process of its own, that finds no compiler of C.
Prints a line per variant: card, kernel, bytes of shared memory.
"""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver, jit

from headwater.gpu.cached_attention import cache_shape
from headwater.gpu.kernels import (
    activations,
    attend,
    combine,
    decode_steps,
    expansion,
    few_rows,
    gating,
    grouped,
    weights,
)
from headwater.gpu.kernels.experts import ExpertStack, Rows, Tiles
from headwater.gpu.kernels.handover import add_and_norm
from headwater.gpu.kernels.table import EXPANDED_FROM, HEIGHTS, MOST_QUANTIZED
from headwater.gpu.lane import MOST_PREDICTED, Lane
from headwater.gpu.resident import Norm, ResidentGate
from headwater.model.layer_spec import GqaSpec, MlaSpec, MoeFfnSpec, RopeSpec
from tests.gpu.fake_cuda import FakeDriver

HIDDEN, INTERMEDIATE, EXPERTS = 7168, 2048, 6
FP8_CAPABILITY = 89
_RUN = jit.JITFunction.run
_capability = 0
_driver: FakeDriver
_seen: set[object] = set()


def _compare(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """What the card was given last must be what the kernel was called with."""
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, arguments, strict=False)) | options
    expected = []
    for parameter in kernel.params:
        value = values[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            continue
        if isinstance(value, Tensor):
            value = value.data_ptr() + _driver.cuda.HOST_OFFSET
        expected.append(pytest.approx(value) if isinstance(value, float) else value)
    # And no scratch memory.
    name, found = _driver.cuda.launches[-1]
    assert (name, list(found)) == (kernel.fn.__name__, [*expected, 0, 0])


def _run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stands in for JITFunction.run, which it calls."""
    num_before = len(_driver.cuda.launches)
    compiled = _RUN(kernel, *arguments, grid=grid, warmup=warmup, **options)
    assert len(_driver.cuda.launches) == num_before + 1
    _compare(kernel, arguments, options)
    if compiled.hash not in _seen:
        _seen.add(compiled.hash)
        print(f"{_capability} {kernel.fn.__name__} {compiled.metadata.shared}", flush=True)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _stacks() -> dict[str, ExpertStack]:
    """One of every format; four-bit ones with groups of 128 and 32."""
    gate_up, down = (EXPERTS, 2, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    found: dict[str, dict[str, Tensor]] = {"bf16": {}, "fp8": {}, "int4": {}, "mxfp4": {}}
    for name, shape in (("gate_up", gate_up), ("down", down)):
        *lead, rows, columns = shape
        found["bf16"][name] = _empty(*shape, dtype=torch.bfloat16)
        found["fp8"][name] = _empty(*shape, dtype=torch.float8_e4m3fn)
        found["fp8"][f"{name}.scale"] = _empty(*lead, rows // 128, columns // 128)
        for fmt in ("int4", "mxfp4"):
            found[fmt][name] = _empty(*lead, rows, columns // 2, dtype=torch.uint8)
        scale = _empty(*lead, rows, columns // 128, dtype=torch.bfloat16)
        found["int4"][f"{name}.scale"] = scale
        found["int4"][f"{name}.zero"] = _empty(*lead, rows, columns // 128, dtype=torch.uint8)
        found["mxfp4"][f"{name}.scale"] = _empty(*lead, rows, columns // 32, dtype=torch.uint8)
    return {fmt: ExpertStack.of(parts) for fmt, parts in found.items()}


def _compile_products() -> None:
    num_rows = 100
    index = _empty(num_rows, dtype=torch.int32)
    plain = Rows(_empty(num_rows, HIDDEN, dtype=torch.float16), None, index)
    act = Rows(_empty(num_rows, INTERMEDIATE, dtype=torch.float16))
    eight = torch.float8_e4m3fn
    quantized = Rows(_empty(num_rows, HIDDEN, dtype=eight), _empty(num_rows, HIDDEN // 128), index)
    quantized_act = Rows(
        _empty(num_rows, INTERMEDIATE, dtype=eight), _empty(num_rows, INTERMEDIATE // 128)
    )
    out = _empty(num_rows, HIDDEN)
    table = _empty(3, 50, dtype=torch.int32)
    for fmt, stack in _stacks().items():
        expanded = expansion.expand(stack)
        for height in (HEIGHTS[0], MOST_QUANTIZED, EXPANDED_FROM):
            tiles = Tiles(table, 7, num_rows, height)
            met = expanded if height >= EXPANDED_FROM else stack
            grouped.gate_up(plain, met, tiles, act)
            grouped.down(act, met, tiles, out)
            if fmt == "fp8" and height <= MOST_QUANTIZED and _capability >= FP8_CAPABILITY:
                grouped.gate_up(quantized, stack, tiles, quantized_act)
                grouped.down(quantized_act, stack, tiles, out)


def _compile_others() -> None:
    x = _empty(100, HIDDEN, dtype=torch.float16)
    places, shares = _empty(100, 8, dtype=torch.int32), _empty(100, 8)
    combine.add_weighted(_empty(100, HIDDEN), _empty(50, HIDDEN), places, shares, 3)
    lane, norm = Lane(5, 64, 8, torch.device("cpu")), Norm(_empty(HIDDEN), 1e-6)
    routed = MoeFfnSpec(256, 8, 2048, "sigmoid_bias_group", True, 2.5, 8, 4)
    gate = ResidentGate(routed, _empty(256, HIDDEN), _empty(256))
    for count in (1, 3, 5):
        hidden, pieces = _empty(count, HIDDEN), _empty(3, count, HIDDEN)
        add_and_norm(hidden, pieces, None, norm, is_kept=True)
        add_and_norm(hidden, pieces[:1], (lane, 2), norm, is_kept=False)
        add_and_norm(hidden, None, (lane, 2), None, is_kept=False)
        gating.choose(gate, hidden, lane, 2)
        if count <= MOST_PREDICTED:
            gating.predict(gate, hidden, norm, lane, 2)
    positions = _empty(1, dtype=torch.int64)
    rope = RopeSpec("default", 64, 1e4, is_interleaved=True)
    mla = MlaSpec(128, 1536, 512, 128, 64, 128, 0.1, rope)
    angles = _empty(4096, 1, 32), _empty(4096, 1, 32)
    cache = _empty(1, 4096, 576, dtype=torch.float16)
    norms = _empty(1536), _empty(512)
    decode_steps.mla_inputs(mla, _empty(8, 1, 2112), norms, angles, positions, cache, 1e-6)
    matrix = _empty(128, 128, 512, dtype=torch.float16)
    decode_steps.mla_queries(mla, _empty(2, 1, 128 * 192), matrix, angles, positions)
    latents = _empty(1, 128, 512)
    # Few latents, and many.
    for bound in (4096, 16384):
        shape = cache_shape(mla)
        attend.attend(_empty(1, 128, 576), cache, positions, shape, bound, latents)
    decode_steps.mla_values(mla, latents, matrix.view(128, 512, 128))
    gqa = GqaSpec(32, 4, 128, True, 0.1, RopeSpec("default", 128, 1e4))
    cache = _empty(1, 4096, 2, 4, 128, dtype=torch.float16)
    angles = _empty(4096, 1, 64), _empty(4096, 1, 64)
    norm = Norm(_empty(128), 1e-6)
    decode_steps.gqa_inputs(gqa, _empty(2, 1, 40 * 128), (norm, norm), angles, positions, cache)
    out = _empty(1, 32 * 128, dtype=torch.float16)
    attend.attend(_empty(1, 32, 128), cache, positions, cache_shape(gqa), 4096, out)
    if _capability >= FP8_CAPABILITY:
        activations.quantize(x)
        values = _empty(1536, HIDDEN, dtype=torch.float8_e4m3fn)
        for count in (1, 5):
            few_rows.few_rows_pieces(x[:count], values, _empty(12, HIDDEN // 128))


def _refuse(src: str, name: str, **_: object) -> None:
    raise AssertionError(f"Triton would compile {name}, of {len(src)} bytes of C")


if __name__ == "__main__":
    nvidia.compile_module_from_src = _refuse
    jit.JITFunction.run = _run
    for _capability in map(int, sys.argv[1:]):
        _driver = FakeDriver(_capability)
        driver.set_active(_driver)
        knobs.runtime.kernel_load_start_hook.add(_driver.expect)
        major_minor = divmod(_capability, 10)
        for module in (grouped, attend, weights):
            module.capability_of = lambda _, found=major_minor: found  # type: ignore[attr-defined]
        _compile_products()
        _compile_others()
