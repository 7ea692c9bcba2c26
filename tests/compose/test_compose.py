"""`docker compose up` of a clean clone: healthy, pinned, one copy of the weights, self-healing.

Runs where a container engine is up, takes minutes (the images are built), and is skipped elsewhere.
What it measured is printed as JSON: pytest -s tests/compose.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headwater.client import Client
from headwater.generation import SamplingParams
from tests.compose.project import ComposeProject, docker, not_usable_reason

WATCHDOG_SECONDS = 3600
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ENGINES = ("decode", "prefill", "router", "gateway")
# Of the container's first process: all others inherit it.
AFFINITY = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(1))))"
# Pss in bytes of every process of the container, but of this program: of the segments by kind, and
# of everything else. Segments are known by their inodes: their maker mapped them without a name.
MEMORY = """
import glob, json, os
kinds = {}
for entry in os.scandir("/dev/shm"):
    status = entry.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    kinds[device, str(status.st_ino)] = entry.name.split(".")[1]
sums = {"weights": 0, "kv": 0, "other": 0}
for path in glob.glob("/proc/[0-9]*/smaps"):
    if path.split("/")[2] == str(os.getpid()):
        continue
    for line in open(path):
        fields = line.split()
        if "-" in fields[0]:
            kind = kinds.get((fields[3], fields[4]), "other")
        elif fields[0] == "Pss:":
            sums[kind] += int(fields[1]) * 1024
print(json.dumps(sums))
"""

_REASON = not_usable_reason()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """In the place of the one for all tests: images take longer to build."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def pins() -> dict[str, list[int]]:
    """Cores by service."""
    cores = sorted(os.sched_getaffinity(0))
    return {"decode": cores[:1], "prefill": cores[-1:], "router": cores, "gateway": cores}


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, pins: dict[str, list[int]]
) -> Iterator[ComposeProject]:
    """The running stack; afterwards nothing of it may be left."""
    variables = {
        f"{name.upper()}_CPUS": ",".join(map(str, cores))
        for name, cores in pins.items()
        if name != "gateway"
    }
    folder = tmp_path_factory.mktemp("compose") / "clone"
    made = ComposeProject(folder, f"hwtest{os.getpid()}", variables)
    seconds = {"build": made.build()}
    try:
        seconds["up"] = made.up()
        images = {name: each["Config"]["Image"] for name, each in made.services().items()}
        sizes = {
            image: int(docker("image", "inspect", "-f", "{{.Size}}", image))
            for image in {*images.values(), "debian:bookworm-slim"}
        }
        report("started", {"seconds": seconds, "image_bytes": sizes})
        yield made
    finally:
        made.down()
    assert made.remains() == {"containers": "", "volumes": "", "networks": ""}


def report(what: str, values: dict[str, Any]) -> None:
    """For whoever runs this to look at."""
    print(json.dumps({what: values}, indent=2))


def ask_over_http(project: ComposeProject) -> str:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{project.gateway_port}/v1", api_key="unused", timeout=120
    ) as client:
        reply = client.chat.completions.create(
            model=MODEL,
            temperature=0,
            max_tokens=20,
            messages=[{"role": "user", "content": QUESTION}],
        )
    return reply.choices[0].message.content or ""


def test_answers_over_http(project: ComposeProject) -> None:
    assert "Paris" in ask_over_http(project)


async def test_answers_over_grpc(project: ComposeProject) -> None:
    async with Client(f"127.0.0.1:{project.router_port}") as client:
        events = client.chat([("user", QUESTION)], SamplingParams(temperature=0, max_tokens=20))
        pieces = [event.text async for event in events]
    assert "Paris" in "".join(pieces)


def test_each_runs_on_its_cores(project: ComposeProject, pins: dict[str, list[int]]) -> None:
    found = {name: project.run_python(name, AFFINITY) for name in pins}
    report("cores", found)
    assert found == pins


def test_the_weights_are_in_memory_once(project: ComposeProject) -> None:
    ask_over_http(project)
    by_service = {name: project.run_python(name, MEMORY) for name in ENGINES}
    shared = project.run_python(
        "decode",
        "import json, os; print(json.dumps({e.name.split('.')[1]: e.stat().st_size "
        "for e in os.scandir('/dev/shm')}))",
    )
    weights = sum(each["weights"] for each in by_service.values())
    everything = sum(sum(each.values()) for each in by_service.values())
    private = sum(each["other"] for each in by_service.values())
    pool = sum(each["kv"] for each in by_service.values())
    report("pss_bytes", {**by_service, "segments": shared, "weights_sum": weights})
    # Both engines map them, and read them.
    assert min(by_service[name]["weights"] for name in ("decode", "prefill")) > 0
    assert 0.9 * shared["weights"] <= weights <= 1.1 * shared["weights"]
    assert everything <= 1.1 * shared["weights"] + private + pool
    assert pool <= 1.01 * shared["kv"]


def test_nothing_may_be_changed_or_built_inside(project: ComposeProject) -> None:
    look = """
import importlib.util, json, os, shutil
def is_writable(folder):
    try:
        open(folder + "/probe", "w").close()
        os.unlink(folder + "/probe")
        return True
    except OSError:
        return False
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "uid": os.getuid(),
    "effective": int(status["CapEff"], 16),
    "seccomp": int(status["Seccomp"]),
    "writable": [f for f in ("/", "/opt/headwater", "/models", "/tmp") if is_writable(f)],
    "tools": [t for t in ("cc", "gcc", "g++", "c++", "clang", "pip", "pip3") if shutil.which(t)],
    "torch": importlib.util.find_spec("torch") is not None,
}))
"""
    for name in ENGINES:
        assert project.run_python(name, look) == {
            "uid": 10001,
            "effective": 0,
            "seccomp": 2,
            "writable": ["/tmp"],
            "tools": [],
            "torch": name in ("decode", "prefill"),
        }


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("way", ["SIGQUIT", "kill -9"])
def test_what_dies_comes_back(project: ComposeProject, name: str, way: str) -> None:
    container = project.container(name)
    before = project.services()[name]
    if way == "SIGQUIT":
        docker("kill", "--signal=SIGQUIT", container)
    else:
        # Everything in the container but its init.
        docker("exec", container, "sh", "-c", "kill -9 -1")
    start = time.monotonic()
    while project.services()[name]["RestartCount"] == before["RestartCount"]:
        assert time.monotonic() - start < 60, f"{name} is not started again"
        time.sleep(0.1)
    project.until_healthy()
    report("recovered", {"service": name, "way": way, "seconds": time.monotonic() - start})
    assert project.services()[name]["State"]["StartedAt"] != before["State"]["StartedAt"]
    check_answers(project, name)


@pytest.mark.parametrize("name", ENGINES)
def test_what_an_operator_kills_comes_back_when_told_to(project: ComposeProject, name: str) -> None:
    """`docker kill` says SIGKILL, and that Docker takes for a wish that no policy overrides."""
    container = project.container(name)
    docker("kill", container)
    docker("wait", container)
    stopped = project.services()[name]
    assert stopped["HostConfig"]["RestartPolicy"]["Name"] == "always"
    assert stopped["State"]["Status"] == "exited"
    start = time.monotonic()
    project.up()
    report("recovered", {"service": name, "way": "up", "seconds": time.monotonic() - start})
    check_answers(project, name)


def check_answers(project: ComposeProject, restarted: str) -> None:
    """Decode must have found the weights in memory."""
    assert "Paris" in ask_over_http(project)
    if restarted == "decode":
        assert "re-attached segment" in project.log("decode")
