"""Host memory that a GPU can read at full speed: pages locked and known to CUDA.

Owns the registration of ranges of a mapping, one after the other in the order of use, by a thread
of its own: locking takes time (84 ms per GiB were measured), and the first ranges are wanted first.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headwater.errors import ResourceError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096
# cuda_runtime_api.h: cudaHostRegisterDefault, cudaHostRegisterReadOnly
_REGISTER_DEFAULT = 0
_REGISTER_READ_ONLY = 8


@dataclass(frozen=True, slots=True)
class HostRange:
    """`num_bytes` from `address` on; widened to whole pages, which no other range may share."""

    address: int
    num_bytes: int


def page_range(address: int, num_bytes: int) -> HostRange:
    """The whole pages that hold `num_bytes` from `address` on."""
    start = address // _PAGE_BYTES * _PAGE_BYTES
    stop = -(-(address + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
    return HostRange(start, stop - start)


class RegisteredRanges:
    """Ranges that are registered in the background from `start` to `close`.

    `cudart` is torch's binding of the CUDA run time; tests put their own in its place. Mappings
    that may not be written to are registered as such.
    """

    def __init__(self, ranges: Sequence[HostRange], *, cudart: Any = None) -> None:
        self._ranges = ranges
        self._cudart = cudart if cudart is not None else torch.cuda.cudart()
        self._is_stopping = False
        self._changed = threading.Condition()
        self._num_ready = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="host-ranges", daemon=True)
        self.seconds = 0.0

    @property
    def num_ranges(self) -> int:
        """Ranges in all."""
        return len(self._ranges)

    @property
    def registered_bytes(self) -> int:
        """Bytes ready so far."""
        return sum(r.num_bytes for r in self._ranges[: self._num_ready])

    def start(self) -> None:
        """Starts to register."""
        self._thread.start()

    def is_ready(self, index: int) -> bool:
        """Whether range `index` can be copied from."""
        return index < self._num_ready

    def wait(self, index: int) -> None:
        """Waits for range `index`.

        Raises ResourceError when CUDA refused one, UnavailableError when all are let go.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_ready > index or self._problem or self._is_stopping
            )
            if self._num_ready <= index and self._problem:
                raise ResourceError(self._problem)
            if self._num_ready <= index:
                raise UnavailableError(
                    "gpu: prefill is stopping, or takes other weights; try again"
                )

    def close(self) -> None:
        """Ends the thread and lets all ranges go."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()
        for found in self._ranges[: self._num_ready]:
            self._cudart.cudaHostUnregister(found.address)
        self._num_ready = 0

    def _run(self) -> None:
        began_at = time.monotonic()
        for found in self._ranges:
            if self._is_stopping:
                return
            problem = self._register(found)
            with self._changed:
                self.seconds = time.monotonic() - began_at
                if problem:
                    self._problem = problem
                else:
                    self._num_ready += 1
                self._changed.notify_all()
            if problem:
                logger.error("%s", problem)
                return
        logger.info(
            "%.1f GiB of weights are registered with CUDA, after %.1f s",
            self.registered_bytes / 2**30,
            self.seconds,
        )

    def _register(self, found: HostRange) -> str:
        """What is wrong, or nothing."""
        code = 0
        for flags in (_REGISTER_READ_ONLY, _REGISTER_DEFAULT):
            code = int(self._cudart.cudaHostRegister(found.address, found.num_bytes, flags))
            if code == 0:
                return ""
        return (
            f"cudaHostRegister refused {found.num_bytes} bytes of the weights (error {code}); "
            "raise the limit of locked memory (ulimit -l) or set gpu.prefill to off"
        )
