"""Refuses scales that would turn blocks of weights, and then every answer, into NaN.

Owns the check of what was loaded; the scales' meaning is the model code's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.errors import CheckpointError
from headwater.shm import Segment
from headwater.weights.checkpoint import Checkpoint
from headwater.weights.decode import Array
from headwater.weights.plan import LoadPlan, find_part
from headwater.weights.tensors import DType, TensorEntry, TensorSpec

_NUMPY_TYPES = {DType.F32: np.float32, DType.BF16: np.uint16, DType.U8: np.uint8}

# Elements looked at together: the masks stay small beside the scales of a large model.
_CHUNK = 1 << 22
_E8M0_NAN = 255


def check_scales(
    segment: Segment, plan: LoadPlan, specs: Sequence[TensorSpec], checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError naming the first tensor that holds an impossible scale."""
    for entry, spec in zip(plan.entries, specs, strict=True):
        if not entry.name.endswith(".scale"):
            continue
        view = segment.view(entry.offset, entry.num_bytes)
        scales = np.frombuffer(memoryview(view), _NUMPY_TYPES[entry.dtype])
        for start in range(0, scales.size, _CHUNK):
            is_good = _are_good(entry, scales[start : start + _CHUNK])
            if not is_good.all():
                element = start + int(np.argmin(is_good))
                source = checkpoint.tensors[find_part(spec, element).source]
                raise CheckpointError(
                    f"{source.file}: tensor '{source.name}': holds the scale "
                    f"{_value(entry, scales[element : element + 1])}; scales must be finite and "
                    "not negative; fetch the file again"
                )


def _are_good(entry: TensorEntry, scales: Array) -> Array:
    if entry.dtype is DType.U8:
        return np.not_equal(scales, _E8M0_NAN)
    values = _floats(entry, scales)
    are_good: Array = np.isfinite(values) & (values >= 0)
    return are_good


def _value(entry: TensorEntry, scale: Array) -> float:
    return float("nan") if entry.dtype is DType.U8 else float(_floats(entry, scale)[0])


def _floats(entry: TensorEntry, scales: Array) -> Array:
    if entry.dtype is DType.BF16:
        return (scales.astype(np.uint32) << 16).view(np.float32)
    return scales
