"""SMG in front of routers, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from headwater.gateway import gateway_command, gateway_environment, gateway_not_ready_reason
from headwater.gateway_protection import Protection
from tests.integration.stack import free_port


@contextlib.asynccontextmanager
async def gateway(
    port: int,
    router_port: int,
    log_dir: Path,
    *more_router_ports: int,
    otlp_endpoint: str = "",
    protection: Protection | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running SMG, killed at the end."""
    command = gateway_command(
        listen=f"127.0.0.1:{port}",
        metrics_listen=f"127.0.0.1:{free_port()}",
        router_addresses=[f"127.0.0.1:{each}" for each in (router_port, *more_router_ports)],
        otlp_endpoint=otlp_endpoint,
        grace_seconds=1,
        protection=protection,
    )
    with (log_dir / "gateway.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env=gateway_environment(os.environ)
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def until_ready(listen: str, process: asyncio.subprocess.Process, tls_cert: str = "") -> None:
    """Asks the gateway until it is ready; there is nothing else to wait on."""
    while await asyncio.to_thread(gateway_not_ready_reason, listen, tls_cert) is not None:
        assert process.returncode is None, "the gateway ended"
        await asyncio.sleep(0.05)
