"""Brings a checkpoint into shared memory once, and finds it there again.

Owns the life of a weights segment from its plan to its sealing. Knows nothing about models: the
caller says which tensors it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from headwater import shm
from headwater.errors import (
    NotPermittedError,
    SegmentError,
    SegmentExistsError,
    SegmentNotFoundError,
    UnavailableError,
)
from headwater.shm import Lifetime, Segment, SegmentKind, SegmentState
from headwater.weights.checkpoint import read_checkpoint
from headwater.weights.conversion import ConversionJob
from headwater.weights.manifest import WEIGHTS_LAYOUT_VERSION, write_manifest
from headwater.weights.memory import plan_memory
from headwater.weights.placement import Placement, check_placement, memory_nodes, place
from headwater.weights.plan import LoadPlan, plan_load
from headwater.weights.scales import check_scales
from headwater.weights.store import WeightsStore
from headwater.weights.tensors import TensorSpec

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
    shards: int = 1,
    on_progress: ProgressFunction | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> WeightsStore:
    """Re-attaches the weights when they lie in shared memory, else loads them there.

    `shards` says into how many parts along their intermediate dimension the tensors' specs cut the
    experts; each part is placed on the NUMA node it belongs to, where the kernel allows that.

    The segment is named "<shm_prefix>.weights.<digest>", persistent, and owned by this process
    unless another one alive owns it already.

    Raises CheckpointError for a broken checkpoint, SharedMemoryFullError when it cannot fit,
    UnavailableError while another process loads it, CancelledError once `should_stop` says so.
    """
    checkpoint = read_checkpoint(model_dir)
    plan = plan_load(spec_tensors, checkpoint)
    name = f"{shm_prefix}.weights.{plan.digest.hex()[:16]}"
    shm.reap(name)  # an unfinished segment whose loader died
    nodes = memory_nodes()
    store = _reattach(name, plan)
    if store is not None:
        store.placement = _checked_placement(store.segment, plan, shards, nodes)
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
        _place(segment, plan, shards, nodes)
        _fill(segment, plan, threads, on_progress, should_stop)
        check_scales(segment, plan, spec_tensors, checkpoint)
        segment.seal()
    except BaseException:
        segment.poison()
        segment.unlink()
        segment.close()
        raise
    logger.info("loaded %s into segment %s", model_dir, name)
    store = WeightsStore(segment, plan.entries, checkpoint.config_json, was_reattached=False)
    store.placement = _checked_placement(segment, plan, shards, nodes)
    return store


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


def _place(segment: Segment, plan: LoadPlan, shards: int, nodes: tuple[int, ...]) -> None:
    """Slower memory is better than none: where the kernel forbids placing, that is only said."""
    if shards == 1 and len(nodes) == 1:
        return
    try:
        place(segment, plan.entries, shards, nodes)
    except NotPermittedError as error:
        logger.warning("weights are not placed on their NUMA nodes: %s", error)


def _checked_placement(
    segment: Segment, plan: LoadPlan, shards: int, nodes: tuple[int, ...]
) -> Placement | None:
    if shards == 1:
        return None
    placement = check_placement(segment, plan.entries, shards, nodes)
    if placement.misplaced_pages:
        logger.warning(
            "%d of %d pages looked at are not on their NUMA node",
            placement.misplaced_pages,
            placement.checked_pages,
        )
    return placement


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
    copying = segment.start_load(plan.pieces, threads=threads)
    with closing(ConversionJob(segment, plan.conversions, threads)) as converting:
        is_copied = is_converted = False
        while not (is_copied and is_converted):
            if should_stop is not None and should_stop():
                copying.cancel()
                converting.cancel()
            is_copied = is_copied or copying.wait(_POLL_MS)
            is_converted = converting.wait(_POLL_MS if is_copied else 0)
            if on_progress is not None:
                on_progress(
                    copying.loaded_bytes + converting.loaded_bytes,
                    copying.total_bytes + converting.total_bytes,
                )
