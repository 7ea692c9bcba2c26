"""The owner of all shared memory: loads or re-attaches the weights, then makes the KV pool.

Lives in the event loop of the decode process; the loading itself runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import CheckpointError, UnavailableError
from headwater.kernels import Mode
from headwater.kernels.model import NativeTransformer
from headwater.kv.layout import LAYOUT_VERSION
from headwater.kv.memory import KvMemory
from headwater.kv.pool import KvPool
from headwater.kv.sizing import plan_layout
from headwater.memory_rate import weights_read_rate
from headwater.model.spec import ModelSpec
from headwater.services.decode.grammar import GrammarCompiler
from headwater.services.decode.models import answer_model
from headwater.shm import Lifetime, Segment, SegmentKind, reap
from headwater.weights.loader import load_weights
from headwater.weights.placement import memory_nodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from headwater.config import GpuConfig, KvConfig
    from headwater.kernels import WorkerPool
    from headwater.kv.lease import KvLease
    from headwater.model.interface import Model
    from headwater.weights.store import WeightsStore

logger = logging.getLogger(__name__)

FOLLOW_INTERVAL_SECONDS = 0.2
SWEEP_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ReadyMemory:
    """What there is when loading is done.

    `model` computes answers; `prompt_model` computes prompts, with the bits that prefill gives.
    """

    spec: ModelSpec
    weights: WeightsStore
    model: Model
    prompt_model: NativeTransformer
    pool: KvPool
    memory: KvMemory
    kv_segment: Segment
    grammars: GrammarCompiler


class MemoryOwner:
    """Goes from loading to ready once; `close` gives back what is bound to the process."""

    def __init__(
        self,
        model_dir: Path,
        model_name: str,
        *,
        shm_prefix: str,
        threads: int,
        shards: int,
        kv: KvConfig,
        gpu: GpuConfig,
        max_batch: int,
        workers: WorkerPool,
    ) -> None:
        self.model_name = model_name
        self._model_dir = model_dir
        self._shm_prefix = shm_prefix
        self._threads = threads
        self._shards = shards
        self._kv = kv
        self._gpu = gpu
        self._max_batch = max_batch
        self._workers = workers
        self._progress = (0, 0)
        self._ready: ReadyMemory | None = None
        self._loaded = asyncio.Event()
        self._is_closing = False
        self.draining = asyncio.Event()

    def ready(self) -> ReadyMemory:
        """Raises UnavailableError while the weights are loading."""
        if self._ready is None:
            loaded, total = self._progress
            share = f"{loaded / total:.0%} done" if total else "starting"
            raise UnavailableError(f"the weights of {self.model_name} are loading, {share}")
        return self._ready

    async def load(self) -> ReadyMemory:
        """Raises CheckpointError, SegmentError or SharedMemoryFullError.

        With gpu.decode = on also ConfigError or ResourceError, when no GPU will do.
        """
        for name in reap(f"{self._shm_prefix}."):
            logger.warning("removed the segment %s, whose owner is dead", name)
        self._ready = await asyncio.to_thread(self._load)
        self._loaded.set()
        return self._ready

    async def follow_loading(self) -> AsyncIterator[tuple[int, int]]:
        """Yields (loaded, total) bytes until the weights are there."""
        while not self._loaded.is_set():
            yield self._progress
            try:
                async with asyncio.timeout(FOLLOW_INTERVAL_SECONDS):
                    await self._loaded.wait()
            except TimeoutError:
                continue

    async def sweep_forever(self) -> None:
        """Ends late leases as time goes by."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_SECONDS)
            self.ready().pool.sweep()

    def fork(self, epoch: int, lease_id: int, prompt_tokens: int) -> KvLease:
        """Another lease on a complete prompt, ready for generation. Raises as KvPool.fork does."""
        ready = self.ready()
        lease, copies = ready.pool.fork(epoch, lease_id, prompt_tokens)
        ready.memory.copy(copies)
        return lease

    def read_limit(self) -> float:
        """Bytes per second of plain reading by the compute threads; zero: cannot be told."""
        return weights_read_rate(self._workers, self.ready().weights)

    def drain(self) -> None:
        """Ends the streams that last for ever; to be called before the server is stopped."""
        self.draining.set()

    def close(self) -> None:
        """Removes the KV pool; the weights stay for the next start."""
        self._is_closing = True
        if self._ready is not None:
            self._ready.kv_segment.unlink()
            self._ready.kv_segment.close()
            self._ready.weights.close()

    def _load(self) -> ReadyMemory:
        spec = ModelSpec.load(self._model_dir)
        shards = self._shards or _shards_for_nodes(spec)
        weights = load_weights(
            self._model_dir,
            spec.tensors(shards),
            shm_prefix=self._shm_prefix,
            threads=self._threads,
            shards=shards,
            on_progress=self._note_progress,
            should_stop=lambda: self._is_closing,
        )
        layout = plan_layout(spec, self._kv)
        epoch = time.time_ns()
        segment = Segment.create(
            f"{self._shm_prefix}.kv.{epoch:016x}",
            payload_bytes=layout.payload_bytes,
            kind=SegmentKind.KV,
            lifetime=Lifetime.BOUND,
            epoch=epoch,
            layout_version=LAYOUT_VERSION,
        )
        segment.populate(0, layout.payload_bytes)
        segment.mark_ready()
        return ReadyMemory(
            spec=spec,
            weights=weights,
            model=answer_model(
                self._gpu,
                spec,
                weights,
                self._workers,
                max_batch=self._max_batch,
                max_context=min(spec.max_context_tokens, layout.num_blocks * layout.block_tokens),
            ),
            prompt_model=NativeTransformer(spec, weights, self._workers, mode=Mode.PREFILL),
            pool=KvPool(segment, layout, ttl_ms=self._kv.lease_ttl_ms),
            memory=KvMemory(segment, layout),
            kv_segment=segment,
            grammars=GrammarCompiler(self._model_dir, spec.vocab_size, spec.eos_token_ids),
        )

    def _note_progress(self, loaded_bytes: int, total_bytes: int) -> None:
        self._progress = (loaded_bytes, total_bytes)


def _shards_for_nodes(spec: ModelSpec) -> int:
    """As many shards as there are NUMA nodes; one where the experts cannot be cut so."""
    shards = len(memory_nodes())
    try:
        spec.tensors(shards)
    except CheckpointError as error:
        logger.warning("experts stay whole, spread over %d NUMA nodes: %s", shards, error)
        return 1
    return shards
