"""Collects the facts of this machine and runs every check on them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.processes import ManagedProcess
from headwater.doctor import cpu, gpu, measure, memory, security, software, storage
from headwater.doctor.host import Host
from headwater.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.config import Config
    from headwater.doctor.finding import Finding

# What each package is needed for, by the processes that the configuration starts.
_ENGINE = {"torch": "prefill and decode compute with it", "safetensors": "decode reads weights"}
_ROUTER = {"grpcio": "the processes talk with it", "protobuf": "their messages"}
_GATEWAY = {"smg": "the HTTP gateway; or set gateway.enabled to false"}
_GPU = {"triton": "the GPU's kernels"}


def examine(config: Config, host: Host | None = None) -> Iterator[Finding]:
    """All findings, as they are made; takes a few seconds."""
    host = host or Host()
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    yield from _isa(host)
    threads = {
        "decode.threads": config.decode.threads,
        "prefill.threads": config.prefill.threads,
    }
    yield from cpu.check_cores(host, allowed, threads)
    yield from cpu.check_cpuset(host, allowed)
    nodes = _memory_nodes()
    yield from memory.check_numa(host, nodes, tuple(measure.node_rates(host, nodes, allowed)))
    files, what = _checkpoint(config)
    yield from storage.check_model(config.model.path, files)
    needed = sum(path.stat().st_size for path in files)
    space = measure.shm_space(config.shm.name_prefix)
    yield from memory.check_ram(host, space.own_bytes if space else 0, needed, what)
    yield from memory.check_huge_pages(host)
    yield from memory.check_shm(space, needed, what)
    demands = {"gpu.prefill": config.gpu.prefill, "gpu.decode": config.gpu.decode}
    demanded_by = tuple(setting for setting, value in demands.items() if value == "on")
    cuda = measure.cuda_facts(demanded_by, config.gpu.vram_gib)
    yield from memory.check_memlock(_memlock(), has_gpu=bool(cuda.devices))
    yield from memory.check_sys_nice(host, len(nodes), measure.bind_problem(nodes[0]))
    yield from gpu.check_gpus(host, cuda)
    yield from gpu.check_driver(host, cuda)
    yield from gpu.check_links(host, cuda)
    yield from storage.check_disk(measure.disk_gb_per_s(files), needed, what)
    yield from software.check_ports(tuple(_ports(config)))
    yield from security.check_tls(config.tls)
    yield from security.check_reach(config)
    yield from _versions(config, has_gpu=bool(cuda.devices))


def _isa(host: Host) -> list[Finding]:
    from headwater.kernels import isa, self_test, supported_isas

    problem = ""
    try:
        in_use = isa()
        self_test()
    except ConfigError:
        in_use = ""
    except HeadwaterError as failure:
        problem = str(failure)
    forced = os.environ.get("HEADWATER_FORCE_ISA", "")
    return cpu.check_isa(host, in_use, supported_isas(), forced, problem)


def _memory_nodes() -> tuple[int, ...]:
    from headwater.weights.placement import memory_nodes

    return memory_nodes()


def _checkpoint(config: Config) -> tuple[list[Path], str]:
    """The weights' files, and what to call them; none for a default model not converted yet."""
    if config.model.path:
        folder = Path(config.model.path).expanduser()
        return sorted(folder.glob("*.safetensors")), f"the model {folder.name}"
    cache = Path(config.state.cache_dir).expanduser()
    found = sorted(cache.glob(f"*-{config.model.format}/*.safetensors"))
    return found, "the default model"


def _memlock() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _ports(config: Config) -> Iterator[software.Port]:
    folder = Path(config.state.run_dir).expanduser() / config.shm.prefix
    wanted = [(name, f"{name}.listen", getattr(config, name).listen) for name in _SERVICES]
    if config.router.plain_listen:
        wanted.append(("router", "router.plain_listen", config.router.plain_listen))
    if config.gateway.enabled:
        wanted.append(("gateway", "gateway.listen", config.gateway.listen))
        wanted.append(("gateway", "gateway.metrics_listen", config.gateway.metrics_listen))
    first = config.telemetry.prometheus_listen
    if first:
        host, _, port = first.rpartition(":")
        for offset, name in enumerate((*_SERVICES, "supervisor")):
            wanted.append((name, "telemetry.prometheus_listen", f"{host}:{int(port) + offset}"))
    for name, setting, address in wanted:
        problem = measure.bind_error(address)
        owner = ManagedProcess(name, folder).pid() if problem else None
        yield software.Port(setting, address, problem, owner)


_SERVICES = ("router", "prefill", "decode")


def _versions(config: Config, *, has_gpu: bool) -> list[Finding]:
    needed = {**_ROUTER, **_ENGINE, **(_GATEWAY if config.gateway.enabled else {})}
    if has_gpu:
        needed |= _GPU
    packages = {"headwater": _version("headwater") or "(not installed)"}
    packages |= {name: _version(name) for name in needed}
    version = sys.version_info
    return software.check_versions(
        (version.major, version.minor, version.micro), platform.release(), packages, needed
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
