"""`headwater health`, as the health checks of containers call it."""

from __future__ import annotations

import asyncio

import pytest

from headwater.cli.main import main
from headwater.rpc.server import Registration, Server
from tests.integration.stack import free_port

ROUTER = Registration(lambda servicer, server: None, None, "headwater.v1.RouterService")


async def health(router_port: int, *names: str) -> int:
    """The exit status; nobody listens where the other services would."""
    arguments = ["health", *names]
    for name in ("prefill", "decode", "gateway"):
        arguments += ["--set", f"{name}.listen=127.0.0.1:{free_port()}"]
    # As in containers: listening everywhere, asked from inside.
    arguments += ["--set", f"router.listen=0.0.0.0:{router_port}"]
    return await asyncio.to_thread(main, arguments)


async def test_it_tells_ready_from_alive(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server("127.0.0.1:0", [ROUTER])
    port = await server.start()
    assert await health(port, "router") == 1
    assert await health(port) == 1
    assert capsys.readouterr().out == "router NOT_SERVING\n" * 2
    await server.set_ready(True)
    assert await health(port, "router") == 0
    assert await health(port) == 0
    assert capsys.readouterr().out == "router SERVING\n" * 2
    # Asked for by name, what does not listen counts.
    assert await health(port, "router", "decode") == 1
    await server.stop(0)


async def test_where_nobody_listens_nobody_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert await health(free_port()) == 1
    assert capsys.readouterr().out == "no service listens here\n"
