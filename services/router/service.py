"""The router process: watches the engines and serves text until told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.rpc.link import Link
from headwater.rpc.server import Server, stop_signal
from headwater.services.router.gauges import observe_router
from headwater.services.router.router import build_router

if TYPE_CHECKING:
    from headwater.config import Config


async def run(config: Config) -> None:
    """Serves until SIGTERM. Raises HeadwaterError when it cannot start."""
    stop = stop_signal()
    link = Link.of(config)
    model_dir = Path(config.model.path).expanduser()
    router = build_router(
        model_dir,
        config.model.name or model_dir.name,
        config.router.prefill_address,
        config.router.decode_address,
        max_running=config.router.max_running_requests,
        max_waiting=config.router.max_waiting_requests,
        recovery_seconds=config.router.recovery_seconds,
        prompt_path=config.router.prompt_path,
        objectives=config.objectives,
        records_content=config.telemetry.record_content,
        link=link,
    )
    server = Server(
        config.router.listen, router.registrations, link, "router", config.router.plain_listen
    )
    await server.start()
    router.start()
    observe_router(router.core)
    reporting = asyncio.create_task(router.report_readiness(server.set_ready))
    try:
        await stop.wait()
    finally:
        reporting.cancel()
        router.drain()
        await server.stop(config.router.grace_seconds)
        await router.stop()
