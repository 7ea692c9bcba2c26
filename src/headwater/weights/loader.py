"""Brings a checkpoint into shared memory once, and finds it there again.

Owns the life of a weights segment from its plan to its sealing. Knows nothing about models: the
caller says which tensors it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headwater import shm
from headwater.errors import (
    CheckpointError,
    SegmentError,
    SegmentExistsError,
    SegmentNotFoundError,
    UnavailableError,
)
from headwater.shm import Lifetime, Segment, SegmentKind, SegmentState
from headwater.weights.checkpoint import Checkpoint, read_checkpoint
from headwater.weights.manifest import WEIGHTS_LAYOUT_VERSION, write_manifest
from headwater.weights.memory import plan_memory
from headwater.weights.plan import LoadPlan, find_part, plan_load
from headwater.weights.store import WeightsStore
from headwater.weights.tensors import DType, TensorEntry, TensorSpec

logger = logging.getLogger(__name__)

ProgressFunction = Callable[[int, int], None]
"""Called with the bytes loaded so far and the bytes in all."""

_POLL_MS = 100


def load_weights(
    model_dir: Path,
    spec_tensors: Sequence[TensorSpec],
    *,
    shm_prefix: str,
    threads: int = 4,
    on_progress: ProgressFunction | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> WeightsStore:
    """Re-attaches the weights when they lie in shared memory, else loads them there.

    The segment is named "<shm_prefix>.weights.<digest>", persistent, and owned by this process
    unless another one alive owns it already.

    Raises CheckpointError for a broken checkpoint, SharedMemoryFullError when it cannot fit,
    UnavailableError while another process loads it, CancelledError once `should_stop` says so.
    """
    checkpoint = read_checkpoint(model_dir)
    plan = plan_load(spec_tensors, checkpoint)
    name = f"{shm_prefix}.weights.{plan.digest.hex()[:16]}"
    shm.reap(name)  # an unfinished segment whose loader died
    store = _reattach(name, plan)
    if store is not None:
        return store
    memory = plan_memory(shm.HEADER_BYTES + plan.payload_bytes)
    logger.info("%s: %s", model_dir, memory)
    memory.check(name)
    try:
        segment = Segment.create(
            name,
            plan.payload_bytes,
            kind=SegmentKind.WEIGHTS,
            lifetime=Lifetime.PERSISTENT,
            layout_version=WEIGHTS_LAYOUT_VERSION,
            digest=plan.digest,
        )
    except SegmentExistsError:
        raise _being_loaded(name) from None
    try:
        _fill(segment, plan, threads, on_progress, should_stop)
        _check_scales(segment, plan, spec_tensors, checkpoint)
        segment.seal()
    except BaseException:
        segment.poison()
        segment.unlink()
        segment.close()
        raise
    logger.info("loaded %s into segment %s", model_dir, name)
    return WeightsStore(segment, plan.entries, checkpoint.config_json, was_reattached=False)


def _reattach(name: str, plan: LoadPlan) -> WeightsStore | None:
    infos = [info for info in shm.list_segments(name) if info.name == name]
    if not infos:
        return None
    if infos[0].state is SegmentState.FILLING:
        raise _being_loaded(name)
    try:
        segment = Segment.attach(name, layout_version=WEIGHTS_LAYOUT_VERSION, digest=plan.digest)
    except SegmentNotFoundError:
        return None
    store = WeightsStore.from_segment(segment)
    try:
        segment.adopt_ownership()
    except SegmentError as error:
        # Sealed weights are safe to share, owned or not; our mapping alone keeps them.
        logger.info("attached without owning: %s", error)
    logger.info("re-attached segment %s", name)
    return store


def _being_loaded(name: str) -> UnavailableError:
    return UnavailableError(
        f"segment '{name}': another process is loading these weights; try again when it is done"
    )


def _fill(
    segment: Segment,
    plan: LoadPlan,
    threads: int,
    on_progress: ProgressFunction | None,
    should_stop: Callable[[], bool] | None,
) -> None:
    write_manifest(segment, plan.manifest, plan.manifest_offset)
    job = segment.start_load(plan.pieces, threads=threads)
    is_done = False
    while not is_done:
        if should_stop is not None and should_stop():
            job.cancel()
        is_done = job.wait(_POLL_MS)
        if on_progress is not None:
            on_progress(job.loaded_bytes, job.total_bytes)


def _check_scales(
    segment: Segment, plan: LoadPlan, specs: Sequence[TensorSpec], checkpoint: Checkpoint
) -> None:
    """A damaged scale would turn a block of weights, and then every answer, into NaN."""
    for entry, spec in zip(plan.entries, specs, strict=True):
        if entry.dtype is DType.F32 and entry.name.endswith(".scale"):
            scales = _as_array(segment, entry)
            is_good = np.isfinite(scales) & (scales >= 0)
            if not is_good.all():
                element = int(np.argmin(is_good))
                source = checkpoint.tensors[find_part(spec, element).source]
                raise CheckpointError(
                    f"{source.file}: tensor '{source.name}': holds the scale {scales[element]}; "
                    "scales must be finite and not negative; fetch the file again"
                )


def _as_array(segment: Segment, entry: TensorEntry) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    view = segment.view(entry.offset, entry.num_bytes)
    return np.frombuffer(memoryview(view), dtype=np.float32)
