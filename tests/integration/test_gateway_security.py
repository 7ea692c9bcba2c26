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
from tests.integration.router_rig import MODEL_DIR, start_router
from tests.integration.stack import free_port

ANSWER = " Paris."
PROMPT = "The capital of France is"
KEY = "correct-horse-battery-staple"
UNAUTHORIZED = 401
CONTENT_TOO_LARGE = 413


@dataclass
class Edge:
    """A running gateway, and what a caller needs to know of it."""

    url: str
    log: Path
    pid: int

    def client(self, key: str, context: ssl.SSLContext) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=context),
        )


@contextlib.asynccontextmanager
async def edge(tmp_path: Path, protection: Protection) -> AsyncIterator[Edge]:
    """A gateway with it, in front of a router that wants TLS of everybody else."""
    link = Link(Authority(tmp_path, "inner").issue("stack"))
    tokenizer = Tokenizer.load(MODEL_DIR)
    decode = FakeDecode(script=[*tokenizer.encode(ANSWER, add_special_tokens=False), EOS_TOKEN_ID])
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
        await start_router(router, server, exits)
        listen = f"127.0.0.1:{free_port()}"
        port = int(listen.rpartition(":")[2])
        process = await exits.enter_async_context(
            gateway(port, plain_port, tmp_path, protection=protection)
        )
        tls_cert = protection.gateway.tls_cert
        await until_ready(listen, process, tls_cert)
        url = f"http{'s' if tls_cert else ''}://{listen}"
        yield Edge(url, tmp_path / "gateway.log", process.pid)


async def test_without_a_key_everybody_may_ask_and_nobody_administrate(tmp_path: Path) -> None:
    async with (
        edge(tmp_path, Protection()) as found,
        openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client,
        openai.DefaultAsyncHttpxClient() as http,
    ):
        reply = await client.completions.create(model="tiny", prompt=PROMPT)
        assert reply.choices[0].text == ANSWER
        for path in ("/workers", "/flush_cache"):
            answer = await http.post(found.url + path, json={"url": "grpc://127.0.0.1:1"})
            assert answer.status_code == UNAUTHORIZED


async def test_who_is_let_in(tmp_path: Path) -> None:
    outer = Authority(tmp_path, "outer")
    public = outer.issue("public")
    key_file = tmp_path / "api.key"
    key_file.touch(mode=0o600)
    key_file.write_text(f"{KEY}\n")
    protection = Protection(
        gateway=GatewayConfig(tls_cert=public.cert, tls_key=public.key, api_key_file=str(key_file))
    )
    context = ssl.create_default_context(cafile=outer.path)
    stranger = ssl.create_default_context(cafile=Authority(tmp_path, "stranger").path)
    async with edge(tmp_path, protection) as found:
        async with found.client(KEY, context) as client:
            reply = await client.completions.create(model="tiny", prompt=PROMPT)
            assert reply.choices[0].text == ANSWER
        async with found.client("wrong", context) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="tiny", prompt=PROMPT)
        async with found.client(KEY, stranger) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()
        # Nobody adds a router or empties a cache, not even with the key.
        async with openai.DefaultAsyncHttpxClient(verify=context) as http:
            for key in ("", f"Bearer {KEY}"):
                http.headers["Authorization"] = key
                for path in ("/workers", "/get_loads"):
                    assert (await http.get(found.url + path)).status_code == UNAUTHORIZED
                for path in ("/workers", "/flush_cache"):
                    answer = await http.post(found.url + path, json={"url": "grpc://127.0.0.1:1"})
                    assert answer.status_code == UNAUTHORIZED
            # The name of the model is no secret to SMG.
            http.headers["Authorization"] = ""
            assert (await http.get(f"{found.url}/v1/models")).is_success
        assert await status_of_large_request(found, context) == CONTENT_TOO_LARGE
        # `ps` does not show the key, nor does the log.
        assert KEY.encode() not in Path(f"/proc/{found.pid}/cmdline").read_bytes()
        assert KEY not in found.log.read_text(errors="replace")


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
