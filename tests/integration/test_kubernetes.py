"""The gateway of the Kubernetes manifests finds a node by its labels, through a stand-in API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import openai
import pytest
import yaml  # type: ignore[import-untyped]

from headwater.rpc.server import Server
from headwater.services.router.router import build_router
from headwater.services.router.text.tokenizer import Tokenizer
from tests.integration.fake_engines import (
    EOS_TOKEN_ID,
    FakeDecode,
    FakePrefill,
    serving_decode,
    serving_prefill,
)
from tests.integration.gateway import until_ready
from tests.integration.router_rig import MODEL_DIR, start_router
from tests.integration.stack import free_port

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
NAMESPACE = "headwater"


def manifest(file: str, kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((BASE / file).read_text(encoding="utf-8"))
    [found] = [each for each in documents if each["kind"] == kind]
    return found  # type: ignore[no-any-return]


def pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """A ready pod of this machine."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": labels,
            "uid": name,
            "resourceVersion": "1",
        },
        "spec": {"containers": [{"name": "router"}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class PodsApi(ThreadingHTTPServer):
    """Lists pods, and lets watchers wait; `asked` are the paths it was asked for."""

    daemon_threads = True

    def __init__(self, pods: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _PodsHandler)
        self.pods = pods
        self.asked: list[str] = []
        self.closing = threading.Event()


class _PodsHandler(BaseHTTPRequestHandler):
    server: PodsApi

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        query = parse_qs(urlsplit(self.path).query)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if "watch" in query:
            self.server.closing.wait()
            return
        wanted = [
            term.split("=") for term in query.get("labelSelector", [""])[0].split(",") if term
        ]
        items = [
            each
            for each in self.server.pods
            if all(each["metadata"]["labels"].get(key) == value for key, value in wanted)
        ]
        listing = {
            "apiVersion": "v1",
            "kind": "PodList",
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }
        self.wfile.write(json.dumps(listing).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keeps quiet."""


@contextlib.contextmanager
def serving_pods(pods: list[dict[str, Any]]) -> Iterator[PodsApi]:
    api = PodsApi(pods)
    thread = threading.Thread(target=api.serve_forever)
    thread.start()
    try:
        yield api
    finally:
        api.closing.set()
        api.shutdown()
        thread.join()
        api.server_close()


def kubeconfig(path: Path, port: int) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture
async def router_port() -> AsyncIterator[int]:
    """A router with scripted engines, which answers " Paris."."""
    script = [*Tokenizer.load(MODEL_DIR).encode(" Paris.", add_special_tokens=False), EOS_TOKEN_ID]
    async with contextlib.AsyncExitStack() as exits:
        prefill = await exits.enter_async_context(serving_prefill(FakePrefill()))
        decode = await exits.enter_async_context(serving_decode(FakeDecode(script=script)))
        router = build_router(
            MODEL_DIR, "tiny", prefill.address, decode.address, max_running=4, max_waiting=2
        )
        yield await start_router(router, Server("127.0.0.1:0", router.registrations), exits)


async def test_the_gateway_finds_the_node(router_port: int, tmp_path: Path) -> None:
    [container] = manifest("gateway.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    labels = {
        # What kustomize adds everywhere.
        **yaml.safe_load((BASE / "kustomization.yaml").read_text())["labels"][0]["pairs"],
        **manifest("node.yaml", "DaemonSet")["spec"]["template"]["metadata"]["labels"],
    }
    port = free_port()
    here = {
        "--host": "127.0.0.1",
        "--port": port,
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": free_port(),
        "--service-discovery-port": router_port,
    }
    arguments = [
        f"{name}={here.get(name, value)}" if equals else name
        for name, equals, value in (
            argument.partition("=") if argument.startswith("--") else (argument, "", "")
            for argument in container["args"]
        )
    ]
    pods = [pod("headwater-node-1", labels), pod("stranger", {"app.kubernetes.io/name": "other"})]
    with serving_pods(pods) as api, (tmp_path / "gateway.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *container["command"][1:], *arguments),
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "KUBECONFIG": str(kubeconfig(tmp_path / "kubeconfig", api.server_port)),
            },
        )
        try:
            async with asyncio.timeout(60):
                await until_ready(f"127.0.0.1:{port}", process)
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="unused"
            ) as client:
                reply = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "Hello"}]
                )
            assert reply.choices[0].message.content == " Paris."
            assert all(
                path.startswith(f"/api/v1/namespaces/{NAMESPACE}/pods") for path in api.asked
            )
        finally:
            process.kill()
            await process.wait()
