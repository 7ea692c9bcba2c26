"""A real Prometheus with our rules scrapes a stack; the dashboard's queries find what they want."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from headwater.client import Client
from headwater.generation import SamplingParams
from tests.integration.stack import Stack, free_port

FOLDER = Path(__file__).parents[2] / "docker" / "observability"
JOBS = ("router", "prefill", "decode")
# The second time its prefix is found.
PROMPT = range(1, 40)
TOKENS = 8
# Queries of what only happens on a GPU, in overload, or where the weights outgrow the caches.
MAY_BE_EMPTY = ("failed", "missed", "shed", "slo_miss", "preemptions", "recoveries", "dram", "h2d")

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
)


@contextlib.contextmanager
def prometheus(folder: Path, first_port: int) -> Iterator[int]:
    """The port of a server that scrapes the stack's processes every second."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{first_port + index}"]}]}
        for index, name in enumerate(JOBS)
    ]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    shutil.copy(FOLDER / "rules.yaml", folder)
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield port
        finally:
            process.terminate()
            process.wait(30)


def ask(port: int, path: str, **query: str) -> Any:
    """The data of an answer of Prometheus' HTTP API."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        answer = json.load(response)
    assert answer["status"] == "success"
    return answer["data"]


async def until_scraped(port: int, query: str) -> None:
    """Returns once the query has a result; Prometheus tells nobody when it scrapes."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                if (await asyncio.to_thread(ask, port, "query", query=query))["result"]:
                    return
            await asyncio.sleep(0.1)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on at the moment."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as exits, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                exits.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


async def test_the_dashboard_shows_a_stack(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    first = free_ports(4)
    stack = make_stack(f"telemetry.prometheus_listen=127.0.0.1:{first}")
    stack.start()
    with prometheus(tmp_path, first) as port:
        await until_scraped(port, "count(up == 1) == 3")
        async with Client(stack.addresses["router"]) as client:
            # A counter that appears with a value has not grown; the second time it has.
            for total in (TOKENS, 2 * TOKENS):
                sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
                assert [event async for event in client.generate(PROMPT, sampling)]
                await until_scraped(port, f"vllm:generation_tokens_total >= {total}")
        await until_scraped(port, "rate(vllm:generation_tokens_total[1m]) > 0")
        dashboard = json.loads(
            (FOLDER / "grafana/dashboards/headwater.json").read_text(encoding="utf-8")
        )
        empty = []
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
                if not ask(port, "query", query=query)["result"]:
                    empty.append(query)
        surprises = [each for each in empty if not any(word in each for word in MAY_BE_EMPTY)]
        assert not surprises
        rules = [rule for group in ask(port, "rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 10
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        assert not ask(port, "alerts")["alerts"]
