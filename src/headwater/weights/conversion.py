"""Fills the parts of a weights segment that cannot be copied as they lie in the checkpoint.

Owns the reading of Conversions in chunks of bounded size, on several threads, beside the native
LoadJob that copies the rest. What is read is forgotten by the page cache at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import numpy as np

from headwater.errors import CancelledError, CheckpointError
from headwater.shm import Segment
from headwater.weights.checkpoint import CheckpointTensor
from headwater.weights.decode import Array, decode_rows, is_row_wise, stored_form
from headwater.weights.plan import Conversion, Target

# Decoded bytes at a time and thread, unless a single row is larger.
_CHUNK_BYTES = 8 << 20

# BF16 is moved as bits, which numpy has no type for.
_NUMPY_TYPES = {
    "F32": np.float32,
    "BF16": np.uint16,
    "F16": np.float16,
    "F8_E4M3": np.uint8,
    "U8": np.uint8,
    "I32": np.int32,
}


class ConversionJob:
    """Conversions under way; counted in bytes of the segment."""

    def __init__(
        self, segment: Segment, conversions: Sequence[Conversion], num_threads: int
    ) -> None:
        self._segment = segment
        self._should_stop = threading.Event()
        self._lock = threading.Lock()
        self._loaded_bytes = 0
        self.total_bytes = sum(
            _target_bytes(conversion, target)
            for conversion in conversions
            for target in conversion.targets
        )
        self._pool = ThreadPoolExecutor(num_threads, "convert")
        self._futures: list[Future[None]] = [
            self._pool.submit(self._convert, conversion) for conversion in conversions
        ]

    @property
    def loaded_bytes(self) -> int:
        """Bytes in the segment so far."""
        return self._loaded_bytes

    def wait(self, timeout_ms: int) -> bool:
        """Waits up to `timeout_ms` for the end: False while at work, True when all is there.

        Raises the first failure, or CancelledError after `cancel`.
        """
        done, pending = wait(self._futures, timeout_ms / 1000, FIRST_EXCEPTION)
        for future in done:
            future.result()
        return not pending

    def cancel(self) -> None:
        """Lets every thread stop after its current chunk."""
        self._should_stop.set()

    def close(self) -> None:
        """Cancels what is not done and waits for the threads."""
        self.cancel()
        self._pool.shutdown(cancel_futures=True)

    def _convert(self, conversion: Conversion) -> None:
        for first, rows in decoded_chunks(conversion):
            if self._should_stop.is_set():
                raise CancelledError(
                    f"loading was cancelled after {self._loaded_bytes} of {self.total_bytes} bytes"
                    " to convert"
                )
            for target in conversion.targets:
                self._write(target, first, rows)

    def _write(self, target: Target, first: int, rows: Array) -> None:
        start = max(target.first_row, first)
        stop = min(target.first_row + target.num_rows, first + rows.shape[0])
        if start >= stop:
            return
        columns = slice(target.first_column, target.first_column + target.num_columns)
        part = rows[start - first : stop - first, columns]
        row_bytes = target.num_columns * rows.itemsize
        offset = target.dest_offset + (start - target.first_row) * row_bytes
        self._segment.populate(offset, part.nbytes)
        view = np.frombuffer(memoryview(self._segment.view(offset, part.nbytes)), rows.dtype)
        np.copyto(view.reshape(part.shape), part)
        with self._lock:
            self._loaded_bytes += part.nbytes


def decoded_chunks(conversion: Conversion, num_rows: int = 0) -> Iterator[tuple[int, Array]]:
    """The decoded tensor in runs of `num_rows`: (first row, [rows, columns]); BF16 comes as uint16.

    Without a number, runs are of a size that suits copying.

    Raises CheckpointError when the file has become unreadable or short.
    """
    tensor, encoding = conversion.tensor, conversion.encoding
    total_rows, num_columns = conversion.shape
    step = num_rows or max(1, _CHUNK_BYTES // (num_columns * conversion.dtype.item_bytes))
    stored_type = _NUMPY_TYPES[tensor.dtype]
    try:
        with tensor.file.open("rb", buffering=0) as file:
            if is_row_wise(encoding):
                row_bytes = tensor.num_bytes // total_rows
                for first in range(0, total_rows, step):
                    stop = min(first + step, total_rows)
                    data = _read(file.fileno(), tensor, first * row_bytes, stop * row_bytes)
                    yield (
                        first,
                        decode_rows(
                            encoding,
                            data.view(stored_type).reshape(stop - first, -1),
                            0,
                            stop - first,
                        ),
                    )
            else:
                assert encoding is not None
                shape = stored_form(encoding, conversion.shape).shape
                data = _read(file.fileno(), tensor, 0, tensor.num_bytes)
                stored = data.view(stored_type).reshape(shape)
                for first in range(0, total_rows, step):
                    stop = min(first + step, total_rows)
                    yield first, decode_rows(encoding, stored, first, stop)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error}") from error


def raw_chunks(tensor: CheckpointTensor) -> Iterator[Array]:
    """The bytes of a tensor as they lie in the file. Raises CheckpointError."""
    try:
        with tensor.file.open("rb", buffering=0) as file:
            for begin in range(0, tensor.num_bytes, _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, tensor.num_bytes)
                yield _read(file.fileno(), tensor, begin, end)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error}") from error


def _read(fd: int, tensor: CheckpointTensor, begin: int, end: int) -> Array:
    """Bytes [begin, end) of the tensor's data."""
    buffer = np.empty(end - begin, np.uint8)
    window = buffer.data
    offset = tensor.file_offset + begin
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(fd, [window[done:]], offset + done)
        if count == 0:
            raise CheckpointError(
                f"{tensor.file}: tensor '{tensor.name}': the file ends at byte {offset + done}, "
                f"{buffer.nbytes - done} bytes too early; fetch the file again"
            )
        done += count
    os.posix_fadvise(fd, offset, buffer.nbytes, os.POSIX_FADV_DONTNEED)
    return buffer


def _target_bytes(conversion: Conversion, target: Target) -> int:
    return target.num_rows * target.num_columns * conversion.dtype.item_bytes
