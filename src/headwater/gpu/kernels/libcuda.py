"""The functions of the CUDA driver that starting a kernel takes, called without a line of C.

Owns their types and constants, which are those of cuda.h, and what a failure becomes: a
RuntimeError, as with torch and Triton.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

from headwater.errors import InternalError

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncSetCacheConfig": (c_void_p, c_int),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}
"""What each function takes; contexts, modules, kernels and streams are void*, results an int."""


class Constant(IntEnum):
    """By their names in cuda.h."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_CACHE_PREFER_SHARED = 1
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3


# What a block may have without asking for more.
_PLAIN_SHARED_BYTES = 48 << 10


class Libcuda:
    """The driver of this machine, or another `library` with the functions of SIGNATURES."""

    def __init__(self, library: Any = None) -> None:
        library = ctypes.CDLL("libcuda.so.1") if library is None else library
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        self._library = library

    def ensure_context(self, device: int) -> None:
        """Gives the calling thread the device's context, unless it has one."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if not context:
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._call("cuCtxSetCurrent", context)

    def max_shared_bytes(self, device: int) -> int:
        """Shared memory that one block can have."""
        most = Constant.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        return self._get("cuDeviceGetAttribute", most, device)

    def load(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[int, int]:
        """Handles of a module, and of its kernel `name`, whose blocks share so many bytes."""
        self.ensure_context(device)
        module, kernel = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), binary)
        self._call("cuModuleGetFunction", byref(kernel), module, name.encode())
        if shared_bytes > _PLAIN_SHARED_BYTES:
            # As Triton does: the tile sizes were measured with as much of it as there is.
            prefer = Constant.CU_FUNC_CACHE_PREFER_SHARED
            self._call("cuFuncSetCacheConfig", kernel, prefer)
            fixed = self._get(
                "cuFuncGetAttribute", Constant.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel
            )
            most = Constant.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", kernel, most, self.max_shared_bytes(device) - fixed)
        return module.value or 0, kernel.value or 0

    def usage(self, kernel: int) -> tuple[int, int, int]:
        """A kernel's registers, spilled words, and the threads that a block can have."""
        registers, local_bytes, threads = (
            self._get("cuFuncGetAttribute", attribute, kernel)
            for attribute in (
                Constant.CU_FUNC_ATTRIBUTE_NUM_REGS,
                Constant.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
                Constant.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            )
        )
        return registers, local_bytes // 4, threads

    def device_address(self, address: int) -> int:
        """Where the device sees host memory. Raises InternalError when it does not see it."""
        found = c_uint64()
        which = Constant.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        code = self._library.cuPointerGetAttribute(byref(found), which, address)
        if code == Constant.CUDA_ERROR_INVALID_VALUE:
            raise InternalError(
                f"a kernel was given a tensor at {address:#x}, which the GPU does not see; "
                "it must be on the GPU, or in pinned memory"
            )
        self._check("cuPointerGetAttribute", code)
        return found.value

    def launch(
        self,
        kernel: int,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        stream: int,
        places: ctypes.Array[Any],
    ) -> None:
        """Queues a kernel with the arguments at `places`, which are read before it returns."""
        code = self._library.cuLaunchKernel(
            kernel, *grid, num_threads, 1, 1, shared_bytes, stream, places, None
        )
        if code:
            self._check("cuLaunchKernel", code)

    def _get(self, function: str, *arguments: Any) -> int:
        found = c_int()
        self._call(function, byref(found), *arguments)
        return found.value

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code == Constant.CUDA_SUCCESS:
            return
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"CUDA error: {function}: {reason} ({code})")
