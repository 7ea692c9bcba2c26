"""The stack of compose.yaml from a clean clone: built, started, looked into, taken down."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.integration.stack import free_port

ROOT = Path(__file__).parents[2]
ENGINE_SECONDS = 5
BUILD_SECONDS = 3000
UP_SECONDS = 900
HEALTHY_SECONDS = 240.0
POLL_SECONDS = 0.5


def not_usable_reason() -> str | None:
    """Why containers cannot be run here; None when they can."""
    if shutil.which("docker") is None:
        return "needs Docker: apt-get install docker.io docker-compose, and start dockerd"
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True, timeout=ENGINE_SECONDS)
        compose_command()
    except (subprocess.SubprocessError, OSError) as error:
        return f"needs a running container engine with compose: start dockerd ({error})"
    return None


def compose_command() -> list[str]:
    """`docker compose`, or the older `docker-compose`. Raises OSError when there is neither."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and _succeeds([*command, "version"]):
            return command
    raise OSError("neither docker compose nor docker-compose is installed")


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def docker(*arguments: str, timeout: float = 60.0, stdin: str = "") -> str:
    """The output of a docker command; fails with its error."""
    result = subprocess.run(
        ["docker", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout
    )
    assert result.returncode == 0, f"docker {' '.join(arguments)}: {result.stderr}"
    return result.stdout.strip()


class ComposeProject:
    """One project in a folder of its own; `variables` are those of .env.example."""

    def __init__(self, folder: Path, name: str, variables: dict[str, str]) -> None:
        self.name = name
        self.router_port = free_port()
        self.gateway_port = free_port()
        self._folder = folder
        self._compose = [*compose_command(), "-p", name]
        self._environment = {
            **os.environ,
            "BUILD_NETWORK": "host",
            "HEADWATER_VERSION": "compose-test",
            "ROUTER_PORT": str(self.router_port),
            "GATEWAY_PORT": str(self.gateway_port),
            **_lockable_memory(),
            **_builder(),
            **variables,
        }

    def build(self) -> float:
        """Clones what is committed and builds the images; returns the seconds it took."""
        subprocess.run(
            ["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(self._folder)],
            check=True,
            timeout=120,
        )
        # Builds do not see the folder where a machine without an index keeps its wheels.
        local = Path(os.environ.get("PIP_FIND_LINKS", "/nonexistent"))
        for wheel in local.glob("torch-*+cpu-*.whl"):
            shutil.copy(wheel, self._folder / "docker" / "wheels")
        start = time.monotonic()
        self.compose("build", timeout=BUILD_SECONDS)
        return time.monotonic() - start

    def up(self) -> float:
        """Starts everything and waits until it is healthy; returns the seconds it took."""
        start = time.monotonic()
        self.compose("up", "-d", timeout=UP_SECONDS)
        self.until_healthy()
        return time.monotonic() - start

    def down(self) -> None:
        """Stops everything and removes the volumes."""
        self.compose("down", "-v", timeout=180)

    def compose(self, *arguments: str, timeout: float) -> None:
        """Runs compose; fails with its output, and with the containers' logs."""
        result = subprocess.run(
            [*self._compose, *arguments],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        assert result.returncode == 0, f"compose {arguments}:\n{result.stdout[-4000:]}"

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return docker("ps", "-aq", *self._filters(), f"--filter=label={_SERVICE}={service}")

    def services(self) -> dict[str, Any]:
        """What the engine knows of each container, by service."""
        ids = docker("ps", "-aq", *self._filters()).split()
        described = json.loads(docker("inspect", *ids)) if ids else []
        return {each["Config"]["Labels"][_SERVICE]: each for each in described}

    def until_healthy(self, seconds: float = HEALTHY_SECONDS) -> None:
        """Returns once every container that checks its health is healthy; fails with the logs."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            states = {
                name: each["State"].get("Health", {}).get("Status", "unchecked")
                for name, each in self.services().items()
            }
            if all(state in ("healthy", "unchecked") for state in states.values()):
                return
            time.sleep(POLL_SECONDS)
        logs = "\n".join(f"{name}:\n{self.log(name)[-1500:]}" for name in states)
        raise AssertionError(f"not healthy in time: {states}\n{logs}")

    def log(self, service: str) -> str:
        """All that the container printed."""
        result = subprocess.run(
            ["docker", "logs", self.container(service)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
        )
        return result.stdout

    def run_python(self, service: str, program: str) -> Any:
        """The JSON that a program prints inside the service's container."""
        output = docker("exec", "-i", self.container(service), "python3", "-", stdin=program)
        return json.loads(output)

    def remains(self) -> dict[str, str]:
        """Ids of what the engine still holds of this project, by kind."""
        return {
            "containers": docker("ps", "-aq", *self._filters()),
            "volumes": docker("volume", "ls", "-q", *self._filters()),
            "networks": docker("network", "ls", "-q", *self._filters()),
        }

    def _filters(self) -> list[str]:
        return [f"--filter=label=com.docker.compose.project={self.name}"]


_SERVICE = "com.docker.compose.service"


def _lockable_memory() -> dict[str, str]:
    """An engine without CAP_SYS_RESOURCE cannot lift its own limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {} if hard == resource.RLIM_INFINITY else {"MEMLOCK": str(hard)}


def _builder() -> dict[str, str]:
    """Without buildx only the classic builder works, and must be named."""
    return {} if _succeeds(["docker", "buildx", "version"]) else {"DOCKER_BUILDKIT": "0"}
