"""Which implementation of the model computes prompts, chosen when weights are attached.

Owns the choice and what the chosen one keeps: CPU kernels, or a GPU through which weights stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headwater.errors import ConfigError, ResourceError
from headwater.kernels import Mode
from headwater.kernels.model import NativeTransformer

if TYPE_CHECKING:
    from headwater.config import GpuConfig
    from headwater.gpu.prefill_session import PrefillSession
    from headwater.kernels import WorkerPool
    from headwater.model.interface import Model
    from headwater.model.spec import ModelSpec
    from headwater.weights.store import WeightsStore

logger = logging.getLogger(__name__)


class PromptModels:
    """Makes the model of a weights segment; one at a time is in use.

    `max_tokens` is what the latest can take in one pass; None: any number.
    """

    def __init__(self, config: GpuConfig, workers: WorkerPool) -> None:
        self._config = config
        self._workers = workers
        self._session: PrefillSession | None = None
        self.max_tokens: int | None = None

    def make(self, spec: ModelSpec, weights: WeightsStore) -> Model:
        """The model on the GPU if there is one that will do, else on the CPU.

        Raises ConfigError or ResourceError when gpu.prefill is on and no GPU will do.
        """
        self.close()
        if self._config.prefill != "off":
            try:
                return self._on_gpu(spec, weights)
            except (ConfigError, ResourceError) as problem:
                if self._config.prefill == "on":
                    raise
                logger.info("prompts are computed on the CPU: %s", problem)
        return NativeTransformer(spec, weights, self._workers, mode=Mode.PREFILL)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights copied to the GPU so far."""
        return self._session.model.streamer.copied_bytes if self._session else 0

    @property
    def ring_occupancy(self) -> float:
        """Share of the ring's slots with experts that are still to be used."""
        return self._session.model.streamer.occupancy if self._session else 0.0

    def close(self) -> None:
        """Lets the device go."""
        if self._session is not None:
            self._session.close()
        self._session, self.max_tokens = None, None

    def _on_gpu(self, spec: ModelSpec, weights: WeightsStore) -> Model:
        # CUDA and Triton are only imported where they are wanted.
        from headwater.gpu.device import find_gpu
        from headwater.gpu.prefill_session import PrefillSession

        gpu = find_gpu(self._config.device, self._config.vram_gib)
        session = PrefillSession(
            spec,
            weights,
            gpu,
            wanted_tokens=self._config.sweep_tokens,
            quantize_from=self._config.quantize_from,
        )
        self._session, self.max_tokens = session, session.plan.max_tokens
        return session.model
