"""Memory: NUMA nodes and what they give, huge pages, /dev/shm, and what may be done with pages."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.doctor.finding import Finding, error, ok, warning
from headwater.doctor.host import Host, gib, selected, shown

NUMA = "NUMA"
HUGE_PAGES = "huge pages"
SHM = "/dev/shm"
RAM = "memory"
MEMLOCK = "memlock"
SYS_NICE = "SYS_NICE"

# A node this much slower than the fastest misses a memory channel, or is in use by others.
_SLOW_NODE = 0.75
# linux/capability.h: CAP_SYS_NICE
_CAP_SYS_NICE = 23


@dataclass(frozen=True, slots=True)
class NodeRate:
    """What the CPUs of a node read from its own memory; `cpus` are those that may be used."""

    node: int
    cpus: tuple[int, ...]
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """/dev/shm, in bytes; `own_bytes` are taken by this stack's segments already."""

    total_bytes: int
    free_bytes: int
    own_bytes: int


def check_numa(host: Host, nodes: tuple[int, ...], rates: tuple[NodeRate, ...]) -> list[Finding]:
    """The nodes whose memory may be used, and how fast each is read."""
    findings = []
    best = max((rate.gb_per_s for rate in rates), default=0.0)
    for rate in rates:
        text = (
            f"node {rate.node}: {rate.gb_per_s:.1f} GB/s read by {len(rate.cpus)} CPUs "
            f"({shown(rate.cpus)})"
        )
        if rate.gb_per_s < _SLOW_NODE * best:
            remedy = "see whether all memory channels of the socket are filled, and what else runs"
            findings.append(warning(NUMA, f"{text}, the fastest node gives {best:.1f}", remedy))
        else:
            findings.append(ok(NUMA, text))
    for node in nodes:
        if node not in {rate.node for rate in rates}:
            findings.append(
                warning(
                    NUMA,
                    f"node {node}: none of its CPUs may be used, so its memory is read from afar",
                    "give the process CPUs of every node (compose: cpuset), or keep it off the "
                    "node's memory (compose: cpuset_mems is not offered; use numactl --membind)",
                )
            )
    if len(nodes) > 1 and host.text("/proc/sys/kernel/numa_balancing") not in ("", "0"):
        findings.append(
            warning(
                NUMA,
                "the kernel moves pages between nodes by itself (kernel.numa_balancing)",
                "sysctl kernel.numa_balancing=0: the weights are placed already",
            )
        )
    return findings


def check_huge_pages(host: Host) -> list[Finding]:
    """Whether private and shared memory get huge pages where the program advises them."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    private = selected(host.text(f"{folder}/enabled"))
    shared = selected(host.text(f"{folder}/shmem_enabled"))
    if not private:
        remedy = "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
        return [warning(HUGE_PAGES, "the kernel has no transparent huge pages", remedy)]
    findings = []
    if shared in ("always", "advise", "within_size", "force"):
        findings.append(ok(HUGE_PAGES, f"shared memory: {shared}"))
    else:
        findings.append(
            warning(
                HUGE_PAGES,
                f"shared memory: {shared or 'unknown'}, so weights lie in pages of 4 KiB, which "
                "costs some reading speed",
                f"echo advise > {folder}/shmem_enabled, as root on the host",
            )
        )
    if private == "never":
        remedy = f"echo madvise > {folder}/enabled, as root on the host"
        findings.append(warning(HUGE_PAGES, "private memory: never", remedy))
    else:
        findings.append(ok(HUGE_PAGES, f"private memory: {private}"))
    return findings


def check_shm(space: ShmSpace | None, needed_bytes: int, what: str) -> list[Finding]:
    """Whether `needed_bytes` of weights, of `what`, fit, beside the KV pool."""
    if space is None:
        remedy = "mount a tmpfs there; in a container that is the default"
        return [error(SHM, "is not there: weights and KV live in it", remedy)]
    text = f"{gib(space.total_bytes)}, {gib(space.free_bytes)} free"
    if space.own_bytes:
        text += f", {gib(space.own_bytes)} taken by this stack"
    room = space.free_bytes + space.own_bytes
    if needed_bytes > room:
        missing = gib(needed_bytes - room)
        return [
            error(
                SHM,
                f"{text}; {what} takes {gib(needed_bytes)}, {missing} too much",
                "mount -o remount,size=... /dev/shm; in a container shm_size, or ipc: host",
            )
        ]
    return [ok(SHM, f"{text}; {what} takes {gib(needed_bytes)}" if needed_bytes else text)]


def check_ram(host: Host, own_bytes: int, needed_bytes: int, what: str) -> list[Finding]:
    """Whether the machine has the memory, whatever /dev/shm promises; pages come when touched."""
    total = host.kib("/proc/meminfo", "MemTotal")
    available = host.kib("/proc/meminfo", "MemAvailable")
    text = f"{gib(total)}, {gib(available)} available"
    if needed_bytes > available + own_bytes:
        return [
            error(
                RAM,
                f"{text}; {what} takes {gib(needed_bytes)}",
                "choose a smaller model or format (headwater convert --format int4), or add memory",
            )
        ]
    return [ok(RAM, text)]


def check_memlock(limit_bytes: int | None, *, has_gpu: bool) -> list[Finding]:
    """How much memory may be locked; None: no limit. Only a GPU's copies lock any."""
    if limit_bytes is None:
        return [ok(MEMLOCK, "no limit")]
    text = f"{limit_bytes / 2**20:.0f} MiB may be locked"
    if has_gpu:
        return [
            warning(
                MEMLOCK,
                f"{text}; registering the weights for copies to the GPU may count against it",
                "ulimit -l unlimited; in a container ulimits: memlock: -1",
            )
        ]
    return [ok(MEMLOCK, f"{text}; without a GPU nothing is")]


def check_sys_nice(host: Host, num_nodes: int, bind_problem: str) -> list[Finding]:
    """Whether pages can be bound to nodes; `bind_problem` is what a try gave, empty: it worked."""
    effective = host.fields("/proc/self/status").get("CapEff", "0")
    has_it = bool(int(effective, 16) >> _CAP_SYS_NICE & 1)
    text = "held" if has_it else "not held"
    if not bind_problem:
        return [ok(SYS_NICE, f"{text}; pages can be bound to NUMA nodes")]
    if num_nodes == 1:
        return [ok(SYS_NICE, f"{text}; not needed, there is one node ({bind_problem})")]
    return [
        error(
            SYS_NICE,
            f"{text}; pages cannot be bound to the {num_nodes} NUMA nodes: {bind_problem}",
            "give the container the capability (compose: cap_add: [SYS_NICE]), or set "
            "model.shards to 1",
        )
    ]
