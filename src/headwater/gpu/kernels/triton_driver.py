"""What starts Triton's kernels, in the place of what Triton builds with a C compiler.

Owns how arguments become a launch. Triton's own driver compiles a C file for CUDA's calls, and
another for each signature of a kernel when it is first used; a machine that serves has no compiler.
Kernels and their arguments are the same as there (triton/backends/nvidia/driver.py).
"""

# mypy: disable-error-code="misc,import-untyped,import-not-found"
from __future__ import annotations

import ctypes
import struct
from functools import cached_property
from typing import Any

from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from headwater.errors import InternalError
from headwater.gpu.kernels.libcuda import Libcuda

_POINTER = "Q"
# struct's codes of Triton's types of scalars, each filled up to the 8 bytes of a slot.
_SCALARS = {
    "i1": "b7x",
    "i8": "b7x",
    "i16": "h6x",
    "i32": "i4x",
    "i64": "q",
    "u1": "B7x",
    "u8": "B7x",
    "u16": "H6x",
    "u32": "I4x",
    "u64": "Q",
    "fp32": "f4x",
    "f32": "f4x",
    "fp64": "d",
}
_SLOT_BYTES = 8
_WARP_THREADS = 32
# Triton's kernels have two pointers more, to memory that none of ours asks for.
_SCRATCH = (0, 0)


class Launcher:
    """Starts one compiled kernel. Triton makes it, from the kernel's source and its metadata."""

    def __init__(self, source: Any, metadata: Any) -> None:
        kinds = list(source.signature.values())
        wanted = {
            "scratch memory": metadata.global_scratch_size or metadata.profile_scratch_size,
            "clusters of blocks": metadata.num_ctas != 1,
            "a cooperative launch": metadata.launch_cooperative_grid,
            "a launch that depends on another": metadata.launch_pdl,
        }
        for kind in kinds:
            is_known = kind == "constexpr" or kind in _SCALARS or kind[0] == "*"
            wanted[f"arguments of the type {kind}"] = not is_known
        missing = [what for what, is_wanted in wanted.items() if is_wanted]
        if missing:
            raise InternalError(
                f"the kernel {metadata.name} needs {' and '.join(missing)}, "
                f"which {__name__} cannot do"
            )
        self._places = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        passed = [kinds[i] for i in self._places]
        self._pointers = [i for i, kind in enumerate(passed) if kind[0] == "*"]
        codes = [_POINTER if kind[0] == "*" else _SCALARS[kind] for kind in passed]
        self._layout = struct.Struct("<" + "".join(codes) + _POINTER * len(_SCRATCH))
        self._num_slots = len(passed) + len(_SCRATCH)
        # Memory for arguments that no launch uses now; threads take it and give it back.
        self._spare: list[tuple[Any, Any]] = []

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        kernel: int,
        metadata: tuple[int, int, int],
        described: Any,
        enter: Any,
        leave: Any,
        *arguments: Any,
    ) -> None:
        """Queues x * y * z blocks; `arguments` are all of the kernel's, constants among them."""
        if x * y * z == 0:
            return
        libcuda: Libcuda = driver.active.utils.libcuda
        libcuda.ensure_context(driver.active.get_current_device())
        values = [arguments[place] for place in self._places]
        for place in self._pointers:
            tensor = values[place]
            address = tensor.data_ptr()
            if address and not tensor.is_cuda:
                address = libcuda.device_address(address)
            values[place] = address
        try:
            room = self._spare.pop()
        except IndexError:
            room = self._new_room()
        slots, places = room
        self._layout.pack_into(slots, 0, *values, *_SCRATCH)
        num_warps, _, shared_bytes = metadata
        if enter is not None:
            enter(described)
        libcuda.launch(kernel, (x, y, z), num_warps * _WARP_THREADS, shared_bytes, stream, places)
        self._spare.append(room)
        if leave is not None:
            leave(described)

    def _new_room(self) -> tuple[Any, Any]:
        """Slots for the values, and their addresses."""
        slots = ctypes.create_string_buffer(self._num_slots * _SLOT_BYTES)
        start = ctypes.addressof(slots)
        addresses = [start + number * _SLOT_BYTES for number in range(self._num_slots)]
        return slots, (ctypes.c_void_p * self._num_slots)(*addresses)


class Utils:
    """What Triton asks of a device."""

    def __init__(self, libcuda: Libcuda) -> None:
        self.libcuda = libcuda

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What decides whether a kernel fits."""
        return {"max_shared_mem": self.libcuda.max_shared_bytes(device)}

    def load_binary(
        self, name: str, binary: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Handles of module and kernel, registers, spilled words, most threads of a block."""
        module, kernel = self.libcuda.load(name, binary, shared_bytes, device)
        return module, kernel, *self.libcuda.usage(kernel)


class Driver(CudaDriver):
    """Triton's, but for what it would compile. Touches no device before a kernel is started."""

    def __init__(self) -> None:
        # Not CudaDriver's, which compiles.
        GPUDriver.__init__(self)
        self.launcher_cls = Launcher

    @cached_property
    def utils(self) -> Utils:
        """The driver's calls."""
        return Utils(Libcuda())


def use_driver() -> None:
    """From now on, this process starts Triton's kernels with it."""
    driver.set_active(Driver())
