"""What starts Triton's kernels: its view of cuda.h, what it refuses, and what failures become."""

# mypy: disable-error-code="import-untyped,import-not-found,misc"
from __future__ import annotations

import ctypes
import importlib.util
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.errors import InternalError
from headwater.gpu.kernels.libcuda import SIGNATURES, Constant, Libcuda

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton: pip install -e .[gpu]", allow_module_level=True)

from triton.backends import nvidia
from triton.runtime import driver

from headwater.gpu.kernels.triton_driver import Driver, Launcher
from tests.gpu.fake_cuda import FakeDriver

HEADER = Path(nvidia.__path__[0], "include", "cuda.h").read_text(encoding="utf-8")
# By value, as C says it.
SCALARS = {"int": ctypes.c_int, "unsigned int": ctypes.c_uint, "CUdeviceptr": ctypes.c_uint64}
PLAIN: dict[str, Any] = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}


@pytest.fixture
def card() -> Iterator[FakeDriver]:
    before = driver.active
    fake = FakeDriver(90)
    driver.set_active(fake)
    yield fake
    driver.set_active(before)


def make(signature: dict[str, Any], **metadata: Any) -> Launcher:
    return Launcher(
        SimpleNamespace(signature=signature), SimpleNamespace(name="k", **PLAIN | metadata)
    )


def type_of(parameter: str) -> Any:
    """How ctypes passes a parameter of cuda.h."""
    words = parameter.replace("*", " * ").split()
    if "*" in words or re.fullmatch(r"CU(context|module|function|stream)", words[0]):
        return ctypes.c_void_p
    if re.fullmatch(r"CU(device|result|func_cache|\w+_attribute)", words[0]):
        return ctypes.c_int
    return SCALARS[" ".join(words[:-1])]


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_are_those_of_the_header(name: str) -> None:
    found = re.search(rf"^CUresult CUDAAPI {name}\(([^)]*)\);", HEADER, re.MULTILINE)
    assert found is not None
    types = [type_of(parameter) for parameter in found[1].split(",")]
    ours = [
        each if each in (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64) else ctypes.c_void_p
        for each in SIGNATURES[name]
    ]
    assert ours == types
    # Another name in the library than in the header would be another function.
    assert re.search(rf"^#define {name} +{name}_v\d", HEADER, re.MULTILINE) is None


@pytest.mark.parametrize("constant", Constant.__members__)
def test_constants_are_those_of_the_header(constant: str) -> None:
    found = re.search(rf"^\s*{constant}\s*= (\w+)", HEADER, re.MULTILINE)
    assert found is not None
    assert int(found[1], 0) == Constant[constant]


def test_importing_the_kernels_takes_triton_over() -> None:
    assert isinstance(driver.active, Driver)


def test_arguments_of_every_type_arrive(card: FakeDriver) -> None:
    values = {
        "i1": True, "i8": -5, "i16": -300, "i32": -70000, "i64": -(1 << 40), "u8": 200,
        "u16": 60000, "u32": 1 << 31, "u64": 1 << 63, "fp32": 0.5, "fp64": 0.1,
    }  # fmt: skip
    declared = {
        "i1": "u8", "i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64", "u8": "u8",
        "u16": "u16", "u32": "u32", "u64": "u64", "fp32": "f32", "fp64": "f64",
    }  # fmt: skip
    card.cuda.expect(f".entry k({', '.join(f'.param .{t} p' for t in declared.values())},"
                     " .param .u64 .ptr p, .param .u64 p, .param .u64 p)")  # fmt: skip
    _, kernel, *_ = card.utils.load_binary("k", b"\x7fELF", 0, 90)
    tensor = torch.zeros(3)
    launcher = make({kind: kind for kind in values} | {"c": "constexpr", "t": "*fp32"})
    launcher(3, 2, 1, 0, kernel, (4, 1, 0), None, None, None, *values.values(), 7, tensor)
    (name, found) = card.cuda.launches[-1]
    assert name == "k"
    bits = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
    expected = [v % (1 << bits[k]) if k in bits else v for k, v in values.items()]
    assert found[: len(values)] == tuple(expected)
    assert found[len(values) :] == (tensor.data_ptr() + card.cuda.HOST_OFFSET, 0, 0)


def test_threads_that_start_a_kernel_at_once_do_not_share_arguments(
    card: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_here = threading.Barrier(2, timeout=60)
    found = []

    def launch(*arguments: Any) -> None:
        both_are_here.wait()
        found.append(ctypes.c_int32.from_address(arguments[-1][0]).value)
        both_are_here.wait()

    monkeypatch.setattr(card.utils.libcuda, "launch", launch)
    launcher = make({"x": "i32"})

    def start(value: int) -> None:
        for _ in range(2):
            launcher(1, 1, 1, 0, 1, (4, 1, 0), None, None, None, value)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(start, (3, 5))) == [None, None]
    assert sorted(found) == [3, 3, 5, 5]


def test_nothing_is_started_for_an_empty_grid(card: FakeDriver) -> None:
    make({})(0, 1, 1, 0, 1, (4, 1, 0), None, None, None)
    assert card.cuda.launches == []


@pytest.mark.parametrize(
    ("metadata", "kind", "what"),
    [
        ({"global_scratch_size": 128}, "i32", "scratch memory"),
        ({"num_ctas": 2}, "i32", "clusters of blocks"),
        ({"launch_cooperative_grid": True}, "i32", "a cooperative launch"),
        ({}, "nvTmaDesc", "arguments of the type nvTmaDesc"),
        ({}, ("i32", "i32"), r"arguments of the type \('i32', 'i32'\)"),
    ],
)
def test_what_it_cannot_do_is_refused(metadata: dict[str, Any], kind: Any, what: str) -> None:
    with pytest.raises(InternalError, match=f"the kernel k needs {what}, which"):
        make({"x": kind}, **metadata)


def test_failures_say_which_call_and_why(card: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    libcuda = Libcuda(card.cuda.library)
    monkeypatch.setattr(card.cuda, "code", 701)
    with pytest.raises(RuntimeError, match=r"cuCtxGetCurrent: error of a fake \(701\)"):
        libcuda.ensure_context(0)
    monkeypatch.setattr(card.cuda, "code", Constant.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(InternalError, match="a tensor at 0x1234, which the GPU does not see"):
        libcuda.device_address(0x1234)
