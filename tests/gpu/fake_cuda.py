"""A CUDA driver for cards that are not there: takes kernels, and notes what they are started with.

Owns the stand-in for libcuda, which ctypes calls as it calls the real one, and Triton's driver on
top of it. A kernel's arguments are read as its own PTX declares them.
"""

# mypy: disable-error-code="misc,import-untyped,import-not-found"
from __future__ import annotations

import ctypes
import re
from ctypes import CFUNCTYPE, c_int
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget

from headwater.gpu.kernels.libcuda import SIGNATURES, Constant, Libcuda
from headwater.gpu.kernels.triton_driver import Driver, Utils

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Of one block, by compute capability (CUDA C++ Programming Guide, technical specifications)."""

_REGISTERS, _THREADS = 64, 1024
_PTX_TYPES: dict[str, Any] = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


class FakeCuda:
    """The fake libcuda of one card; `launches` are kernels' names and arguments.

    It sees host memory HOST_OFFSET higher than the host does, and answers with `code`.
    """

    HOST_OFFSET = 1 << 40

    def __init__(self, capability: int) -> None:
        self.code = 0
        self.launches: list[tuple[str, tuple[float, ...]]] = []
        self._shared_bytes = SHARED_BYTES[capability]
        self._dynamic_bytes: dict[int, int] = {}
        self._context: int | None = None
        self._kernels: list[tuple[str, list[str]]] = []
        self._parameters: list[str] = []
        names = [name for name in SIGNATURES if hasattr(self, name)]
        assert set(names) == set(SIGNATURES)
        self._kept = {
            name: CFUNCTYPE(c_int, *SIGNATURES[name])(getattr(self, name)) for name in names
        }
        self.library = SimpleNamespace(**self._kept)

    def expect(self, ptx: str) -> None:
        """The next kernel to be loaded."""
        entry = ptx[ptx.index(".entry") :]
        self._parameters = re.findall(r"\.param \.(\w+)", entry[: entry.index(")")])

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text[0] = b"error of a fake"
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context[0] = self._context
        return self.code

    def cuCtxSetCurrent(self, context: int) -> int:
        self._context = context
        return self.code

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context[0] = 0xC0 + device
        return self.code

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> int:
        assert attribute == Constant.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        found[0] = self._shared_bytes
        return self.code

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        assert image.startswith(b"\x7fELF")
        module[0] = 1
        return self.code

    def cuModuleGetFunction(self, kernel: Any, module: int, name: bytes) -> int:
        self._kernels.append((name.decode(), self._parameters))
        kernel[0] = len(self._kernels)
        return self.code

    def cuFuncGetAttribute(self, found: Any, attribute: int, kernel: int) -> int:
        found[0] = {
            Constant.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: 0,
            Constant.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: 0,
            Constant.CU_FUNC_ATTRIBUTE_NUM_REGS: _REGISTERS,
            Constant.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: _THREADS,
        }[attribute]  # type: ignore[index]
        return self.code

    def cuFuncSetAttribute(self, kernel: int, attribute: int, value: int) -> int:
        assert attribute == Constant.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._dynamic_bytes[kernel] = value
        return self.code

    def cuFuncSetCacheConfig(self, kernel: int, config: int) -> int:
        return self.code

    def cuPointerGetAttribute(self, found: int, attribute: int, address: int) -> int:
        assert attribute == Constant.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        ctypes.c_uint64.from_address(found).value = address + self.HOST_OFFSET
        return self.code

    def cuLaunchKernel(self, kernel: int, *shape: int) -> int:
        x, y, z, threads, threads_y, threads_z, shared_bytes, _, places, extra = shape
        assert x * y * z > 0
        assert threads <= _THREADS
        assert (threads_y, threads_z) == (1, 1)
        assert extra is None
        assert self._context is not None
        assert shared_bytes <= self._dynamic_bytes.get(kernel, 48 << 10)
        name, parameters = self._kernels[kernel - 1]
        addresses = (ctypes.c_uint64 * len(parameters)).from_address(places)
        types = [_PTX_TYPES[kind] for kind in parameters]
        values = [kind.from_address(at).value for kind, at in zip(types, addresses, strict=True)]
        self.launches.append((name, tuple(values)))
        return self.code


class FakeDriver(Driver):
    """Triton's driver for a fake card, whose number is its compute capability."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.cuda = FakeCuda(capability)
        self._utils = Utils(Libcuda(self.cuda.library))
        self._capability = capability
        self.get_current_device = lambda: capability
        self.get_current_stream = lambda device: 0

    @property
    def utils(self) -> Utils:
        return self._utils

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def expect(self, module: Any, function: Any, name: str, files: dict[str, str], _: str) -> None:
        """A hook for kernels that are about to be loaded."""
        self.cuda.expect(next(Path(f).read_text() for f in files.values() if f.endswith(".ptx")))
