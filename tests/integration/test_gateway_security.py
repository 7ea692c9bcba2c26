"""SMG with HTTPS and an API key, in front of a router that wants TLS of everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from headwater.config import GatewayConfig
from headwater.gateway_protection import Protection
from headwater.rpc.link import Link
from headwater.rpc.server import Server
from headwater.services.router.router import build_router
from headwater.services.router.text.tokenizer import Tokenizer
from tests.certificates import Authority
from tests.integration.fake_engines import (
    EOS_TOKEN_ID,
    FakeDecode,
    FakePrefill,
    serving_decode,
    serving_prefill,
)
from tests.integration.gateway import gateway, until_ready
from tests.integration.stack import free_port

MODEL_DIR = Path(__file__).parents[1] / "data" / "text_model"
ANSWER = " Paris."
KEY = "correct-horse-battery-staple"
UNAUTHORIZED = 401
CONTENT_TOO_LARGE = 413


@dataclass
class Edge:
    """A running gateway, and what a caller needs to know of it."""

    url: str
    ca: Path
    log: Path
    pid: int

    def client(self, key: str, ca: Path | None = None) -> openai.AsyncOpenAI:
        context = ssl.create_default_context(cafile=ca or self.ca)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=context),
        )


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    inner, outer = Authority(tmp_path, "inner"), Authority(tmp_path, "outer")
    link = Link(inner.issue("stack"))
    public = outer.issue("public")
    key_file = tmp_path / "api.key"
    key_file.touch(mode=0o600)
    key_file.write_text(f"{KEY}\n")
    tokenizer = Tokenizer.load(MODEL_DIR)
    decode = FakeDecode(script=[*tokenizer.encode(ANSWER, add_special_tokens=False), EOS_TOKEN_ID])
    protection = Protection(
        gateway=GatewayConfig(tls_cert=public.cert, tls_key=public.key, api_key_file=str(key_file)),
    )
    async with contextlib.AsyncExitStack() as exits:
        prefill_engine = await exits.enter_async_context(serving_prefill(FakePrefill(), link=link))
        decode_engine = await exits.enter_async_context(serving_decode(decode, link=link))
        router = build_router(
            MODEL_DIR,
            "tiny",
            prefill_engine.address,
            decode_engine.address,
            max_running=4,
            max_waiting=2,
            link=link,
        )
        plain_port = free_port()
        plain = f"127.0.0.1:{plain_port}"
        server = Server("127.0.0.1:0", router.registrations, link, "router", plain)
        await server.start()
        exits.push_async_callback(router.stop)
        exits.push_async_callback(server.stop, 0)
        exits.callback(router.drain)
        router.start()
        port = free_port()
        process = await exits.enter_async_context(
            gateway(port, plain_port, tmp_path, protection=protection)
        )
        await until_ready(f"127.0.0.1:{port}", process, public.cert)
        yield Edge(f"https://127.0.0.1:{port}", outer.path, tmp_path / "gateway.log", process.pid)


async def test_who_is_let_in(edge: Edge, tmp_path: Path) -> None:
    prompt = "The capital of France is"
    async with edge.client(KEY) as client:
        reply = await client.completions.create(model="tiny", prompt=prompt)
        assert reply.choices[0].text == ANSWER
    async with edge.client("wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="tiny", prompt=prompt)
    async with edge.client(KEY, ca=Authority(tmp_path, "stranger").path) as client:
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()
    # Whoever adds a router, or empties a cache, needs the key as well.
    context = ssl.create_default_context(cafile=edge.ca)
    async with openai.DefaultAsyncHttpxClient(verify=context) as http:
        for path in ("/workers", "/get_loads"):
            assert (await http.get(edge.url + path)).status_code == UNAUTHORIZED
        for path in ("/workers", "/flush_cache", "/v1/chat/completions"):
            found = await http.post(edge.url + path, json={"url": "grpc://127.0.0.1:1"})
            assert found.status_code == UNAUTHORIZED
        # The name of the model is no secret to SMG.
        assert (await http.get(f"{edge.url}/v1/models")).is_success
    assert await status_of_large_request(edge, context) == CONTENT_TOO_LARGE
    # `ps` shows neither the key nor does the log.
    command_line = Path(f"/proc/{edge.pid}/cmdline").read_bytes()
    assert KEY.encode() not in command_line
    assert KEY not in edge.log.read_text(errors="replace")


async def status_of_large_request(edge: Edge, context: ssl.SSLContext) -> int:
    """Of one whose header announces more than limits.message_bytes; not a byte of it is sent."""
    host, _, port = edge.url.removeprefix("https://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
        b"Content-Type: application/json\r\nContent-Length: 17000000\r\n"
        b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n"
    )
    answer = await reader.readline()
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()
    return int(answer.split()[1])
