"""Puts the router together: model, engines, core, and the two services on top."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from headwater.config import ObjectivesConfig
from headwater.rpc.link import PLAIN
from headwater.rpc.server import Registration
from headwater.services.router.core import RouterCore
from headwater.services.router.grpc_engines import GrpcDecode, GrpcPrefill
from headwater.services.router.objectives import Objectives
from headwater.services.router.outlook import Outlook
from headwater.services.router.policy import PromptPath
from headwater.services.router.polling import LoadPoller
from headwater.services.router.served_model import ServedModel
from headwater.services.router.servicer import RouterServicer
from headwater.services.router.vllm_servicer import VllmServicer
from headwater.v1 import router_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from headwater.rpc.link import Link

ROUTER_SERVICE = "headwater.v1.RouterService"
VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"


class Router:
    """Everything of the router process but its gRPC server."""

    def __init__(
        self, core: RouterCore, prefill: GrpcPrefill, decode: GrpcDecode, link: Link
    ) -> None:
        self.core = core
        self._peers = (prefill, decode)
        self._poller = LoadPoller(core.outlook, self._peers)
        self._vllm = VllmServicer(core, link)
        self.registrations = (
            Registration(
                router_service_pb2_grpc.add_RouterServiceServicer_to_server,
                RouterServicer(core),
                ROUTER_SERVICE,
            ),
            Registration(
                vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, self._vllm, VLLM_SERVICE
            ),
        )
        self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether both engines serve."""
        return all(peer.is_serving for peer in self._peers)

    def start(self) -> None:
        """Begins to watch the engines."""
        for peer in self._peers:
            peer.start(self._changed.set)
        self._poller.start()

    async def report_readiness(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Calls `set_ready` whenever the router's own readiness changes; runs until cancelled."""
        was_serving = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.is_serving != was_serving:
                was_serving = self.is_serving
                await set_ready(was_serving)

    def drain(self) -> None:
        """Ends the streams that last for ever; to be called before the server is stopped."""
        self._vllm.stop()

    async def stop(self) -> None:
        """Gives back the last leases and closes the connections; after the server has stopped."""
        await self._poller.stop()
        await self.core.stop()
        for peer in self._peers:
            await peer.close()


def build_router(
    model_dir: Path,
    model_name: str,
    prefill_address: str,
    decode_address: str,
    *,
    max_running: int,
    max_waiting: int,
    recovery_seconds: float = 0.0,
    prompt_path: str = "auto",
    objectives: ObjectivesConfig | None = None,
    records_content: bool = False,
    link: Link = PLAIN,
) -> Router:
    """A router for the model in `model_dir`; to be called in a running event loop.

    Raises CheckpointError when the folder's tokenizer, template or config.json is not usable, and
    ConfigError when `objectives` do not fit together.
    """
    objectives = objectives or ObjectivesConfig()
    model = ServedModel.load(model_dir, model_name, link.limits)
    prefill = GrpcPrefill(prefill_address, link)
    decode = GrpcDecode(decode_address, link)
    core = RouterCore(
        model=model,
        prefill=prefill,
        decode=decode,
        max_running=max_running,
        max_waiting=max_waiting,
        recovery_seconds=recovery_seconds,
        objectives=Objectives(objectives.classes, objectives.default_class),
        outlook=Outlook(None if prompt_path == "auto" else PromptPath(prompt_path)),
        shed_factor=objectives.shed_factor,
        records_content=records_content,
    )
    return Router(core, prefill, decode, link)
