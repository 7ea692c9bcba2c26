"""Which implementation of the model computes answers, chosen at the start.

Owns the choice: CPU kernels, or a GPU that keeps everything but the routed experts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headwater.errors import ConfigError, ResourceError
from headwater.kernels import Mode
from headwater.kernels.model import NativeTransformer

if TYPE_CHECKING:
    from headwater.config import GpuConfig
    from headwater.gpu.hybrid_model import HybridModel
    from headwater.kernels import WorkerPool
    from headwater.model.interface import Model
    from headwater.model.spec import ModelSpec
    from headwater.weights.store import WeightsStore

logger = logging.getLogger(__name__)

# Of a device that prefill uses too, without gpu.decode_vram_gib. Where the other half would hold
# sweeps of a few thousand tokens only, long prompts would lose more than answers gain.
_SHARE_BESIDE_PREFILL = 1 / 2


def answer_model(
    config: GpuConfig,
    spec: ModelSpec,
    weights: WeightsStore,
    workers: WorkerPool,
    *,
    max_batch: int,
    max_context: int,
) -> Model:
    """The model on GPU and CPU if there is a GPU that will do, else on the CPU.

    Raises ConfigError or ResourceError when gpu.decode is on and no GPU will do.
    """
    on_cpu = NativeTransformer(spec, weights, workers, mode=Mode.DECODE)
    if config.decode != "off":
        try:
            return _hybrid(config, on_cpu, weights, workers, max_batch, max_context)
        except (ConfigError, ResourceError) as problem:
            if config.decode == "on":
                raise
            logger.info("answers are computed on the CPU: %s", problem)
    return on_cpu


def hybrid_of(model: Model) -> HybridModel | None:
    """The model, if a GPU has a part in it."""
    if isinstance(model, NativeTransformer):
        return None
    from headwater.gpu.hybrid_model import HybridModel

    return model if isinstance(model, HybridModel) else None


def _hybrid(
    config: GpuConfig,
    on_cpu: NativeTransformer,
    weights: WeightsStore,
    workers: WorkerPool,
    max_batch: int,
    max_context: int,
) -> Model:
    # CUDA and Triton are only imported where they are wanted.
    from headwater.gpu.device import device_for_decode, devices_for_prefill, find_gpu
    from headwater.gpu.hybrid_session import start_hybrid

    gpu = find_gpu(device_for_decode(config), config.decode_vram_gib, purpose="decode")
    available = gpu.available_bytes
    is_shared = config.prefill != "off" and str(gpu.device) in devices_for_prefill(config)
    if not config.decode_vram_gib and is_shared:
        available = int(available * _SHARE_BESIDE_PREFILL)
    return start_hybrid(
        on_cpu,
        weights,
        workers,
        gpu.device,
        available_bytes=available,
        max_batch=max_batch,
        max_context=max_context,
    )
