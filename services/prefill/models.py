"""Which implementation of the model computes prompts, chosen when weights are attached.

Owns the choice and what the chosen one keeps: CPU kernels, a GPU through which weights stream, or
several GPUs, each with a process of its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headwater.errors import ConfigError, ResourceError, UnavailableError
from headwater.kernels import Mode
from headwater.kernels.model import NativeTransformer

if TYPE_CHECKING:
    from headwater.config import Config
    from headwater.gpu.prefill_session import PrefillSession
    from headwater.gpu.team_model import TeamModel
    from headwater.kernels import WorkerPool
    from headwater.kv.writer import KvWriter
    from headwater.model.interface import Model
    from headwater.model.spec import ModelSpec
    from headwater.services.prefill.ways import PassWays
    from headwater.weights.store import WeightsStore

logger = logging.getLogger(__name__)

_MOST_RANK_THREADS = 4


class PromptModels:
    """Makes the model of a weights segment; one at a time is in use.

    `ways` learns on how many GPUs a pass may be computed, and says on how many the next one is.
    """

    def __init__(self, config: Config, workers: WorkerPool, ways: PassWays) -> None:
        self._config = config
        self._gpu = config.gpu
        self._workers = workers
        self._ways = ways
        self._session: PrefillSession | None = None
        self._team: TeamModel | None = None
        self._model: Model | None = None
        self._is_stopping = False
        self.is_shared_with_decode = False

    def make(self, spec: ModelSpec, weights: WeightsStore) -> Model:
        """The model on the GPUs that will do, else on the CPU.

        Raises ConfigError, ResourceError or UnavailableError when gpu.prefill is on and none will
        do.
        """
        self.close()
        self._model = self._on_gpus(spec, weights)
        if self._model is None:
            self._model = NativeTransformer(spec, weights, self._workers, mode=Mode.PREFILL)
            self._ways.offer({1: self._config.prefill.chunk_tokens})
        return self._model

    @property
    def num_gpus(self) -> int:
        """GPUs that the next pass takes; zero on a CPU."""
        if self._team is not None:
            return self._ways.current
        return int(self._session is not None)

    # What the properties look at may be replaced meanwhile, by another thread.

    @property
    def num_lost(self) -> int:
        """How often ranks were lost and started again."""
        team = self._team
        return team.num_lost if team is not None else 0

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights copied to GPUs so far."""
        team, session = self._team, self._session
        if team is not None:
            return team.copied_bytes
        return session.copied_bytes if session is not None else 0

    @property
    def ring_occupancy(self) -> float:
        """Share of the ring's slots with experts that are still to be used; the first GPU's."""
        team, session = self._team, self._session
        if team is not None:
            return team.occupancy
        return session.model.streamer.occupancy if session is not None else 0.0

    @property
    def measurable(self) -> dict[int, Model]:
        """The models to measure, by number of GPUs."""
        team = self._team
        if team is not None:
            return {way: team.measured_on(way) for way in sorted(team.max_tokens)}
        return {1: self._model} if self._model is not None else {}

    def use_pool(self, writer: KvWriter) -> None:
        """Prompts write to this pool from now on."""
        if self._team is not None:
            self._team.use_pool(writer)

    def share_copies(self, share: float) -> None:
        """Copies of weights take this share of the time from now on, in (0, 1]."""
        team, session = self._team, self._session
        if team is not None:
            team.copy_share = share
        if session is not None:
            session.model.streamer.share = share

    def stop(self) -> None:
        """Ranks end now, whatever they do: a layer, or their start, may take minutes.

        A prompt that they compute ends with UnavailableError.
        """
        self._is_stopping = True
        team = self._team
        if team is not None:
            team.stop()

    def close(self) -> None:
        """Lets the devices go."""
        if self._session is not None:
            self._session.close()
        if self._team is not None:
            self._team.close()
        self._session = self._team = self._model = None

    def _on_gpus(self, spec: ModelSpec, weights: WeightsStore) -> Model | None:
        """On all of gpu.prefill_devices, or on the first, or not at all."""
        if self._gpu.prefill == "off":
            return None
        # CUDA and Triton are only imported where they are wanted.
        from headwater.gpu.device import device_for_decode, devices_for_prefill

        devices = devices_for_prefill(self._gpu)
        self.is_shared_with_decode = f"cuda:{device_for_decode(self._gpu)}" in devices
        ways = [self._with_ranks] if len(devices) > 1 else []
        for way in [*ways, self._with_one]:
            if self._is_stopping:
                raise UnavailableError("prefill is stopping; try again")
            try:
                return way(spec, weights, devices)
            except (ConfigError, ResourceError, UnavailableError) as problem:
                # Devices that somebody named must be there; what happens to them is another matter.
                is_named = isinstance(problem, ConfigError) and self._gpu.prefill_devices != "auto"
                is_last = way == self._with_one or is_named
                if self._is_stopping or (is_last and self._gpu.prefill == "on"):
                    raise
                place = "the CPU" if way == self._with_one else f"{devices[0]} alone"
                logger.warning("prompts are computed on %s: %s", place, problem)
        return None

    def _with_ranks(
        self, spec: ModelSpec, weights: WeightsStore, devices: tuple[str, ...]
    ) -> Model:
        from headwater.gpu.team import RankSettings
        from headwater.gpu.team_model import TeamModel

        threads = max(1, min(_MOST_RANK_THREADS, self._workers.num_threads // len(devices)))
        settings = RankSettings(
            devices=devices,
            weights=weights.handle,
            vram_gib=self._gpu.vram_gib,
            sweep_tokens=self._gpu.sweep_tokens,
            quantize_from=self._gpu.quantize_from,
            threads=threads,
            telemetry=self._config.telemetry,
        )
        self._team = team = TeamModel(spec, settings, lambda: self._ways.current, self._ways.limit)
        try:
            if self._is_stopping:
                team.stop()
            team.start()
        except BaseException:
            self._team = None
            raise
        self._ways.offer(team.max_tokens)
        return team

    def _with_one(self, spec: ModelSpec, weights: WeightsStore, devices: tuple[str, ...]) -> Model:
        from headwater.gpu.device import find_device
        from headwater.gpu.prefill_session import PrefillSession

        self._session = PrefillSession(
            spec,
            weights,
            find_device(devices[0], self._gpu.vram_gib),
            wanted_tokens=self._gpu.sweep_tokens,
            quantize_from=self._gpu.quantize_from,
        )
        self._ways.offer({1: self._session.plan.max_tokens})
        return self._session.model
