"""Instruction set and cores: which kernels run, and on which CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwater.doctor.finding import Finding, error, ok, warning
from headwater.doctor.host import Host, parse_list, shown

ISA = "instruction set"
CORES = "cores"
CPUSET = "cpuset"

# What each kernel table needs of /proc/cpuinfo's flags; see native/include/headwater/cpu.hpp.
_NEEDS = {
    "amx": ("amx_tile", "amx_bf16", "avx512_fp16", "gfni"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_bf16"),
    "avx2": ("avx2", "fma", "f16c"),
}


def check_isa(
    host: Host, in_use: str, supported: Sequence[str], forced: str, self_test_problem: str
) -> list[Finding]:
    """Which kernels run; `forced` is HEADWATER_FORCE_ISA, `self_test_problem` empty when it passed.

    `in_use` is empty when the forced one is not to be had.
    """
    if not in_use:
        return [
            error(
                ISA,
                f"HEADWATER_FORCE_ISA={forced} is unknown or not supported by this CPU",
                f"unset it, or choose one of {', '.join(supported)}",
            )
        ]
    findings = []
    text = f"{in_use} kernels run; this CPU and kernel support {', '.join(supported)}"
    if forced:
        remedy = "unset HEADWATER_FORCE_ISA, unless a comparison is meant"
        findings.append(warning(ISA, f"{text}; HEADWATER_FORCE_ISA={forced} chose", remedy))
    elif in_use in ("amx", "avx512"):
        findings.append(ok(ISA, text))
    else:
        findings.append(
            warning(
                ISA,
                f"{text}; FP8 and BF16 are much slower without AVX-512 BF16 and VBMI",
                "use a CPU with them (AMD Zen 4, Intel Sapphire Rapids or later); in a virtual "
                "machine pass the host's CPU through",
            )
        )
    if self_test_problem:
        findings.append(
            error(ISA, f"the self-test fails: {self_test_problem}", "report it; do not serve")
        )
    flags = set(host.fields("/proc/cpuinfo").get("flags", "").split())
    for name, needed in _NEEDS.items():
        if name not in supported and flags.issuperset(needed):
            findings.append(
                warning(
                    ISA,
                    f"the CPU has {name}, but this process may not use it",
                    "allow it in the hypervisor and use a Linux kernel of 5.16 or later",
                )
            )
    return findings


def check_cores(host: Host, allowed: tuple[int, ...], threads: dict[str, int]) -> list[Finding]:
    """How many CPUs the process may use; `threads` are the settings of the engines, 0: all."""
    online = parse_list(host.text("/sys/devices/system/cpu/online")) or allowed
    cores = len({_core(host, cpu) for cpu in allowed})
    text = f"{len(allowed)} of {len(online)} CPUs may be used, on {cores} cores"
    findings = []
    if len(allowed) < 2:
        remedy = "give it two CPUs at least: prefill and decode work at the same time"
        findings.append(warning(CORES, text, remedy))
    else:
        findings.append(ok(CORES, text))
    for setting, count in threads.items():
        if count > len(allowed):
            findings.append(
                warning(
                    CORES,
                    f"{setting} is {count}, more than the {len(allowed)} CPUs: threads are not "
                    "pinned and take turns",
                    f"set it to 0, or to at most {len(allowed)}",
                )
            )
    return findings


def check_cpuset(host: Host, allowed: tuple[int, ...]) -> list[Finding]:
    """The process's cpuset, and whether a quota cuts into it."""
    online = parse_list(host.text("/sys/devices/system/cpu/online")) or allowed
    is_whole = len(allowed) == len(online)
    which = "all CPUs" if is_whole else "pinned to CPUs"
    findings = [ok(CPUSET, f"{which} {shown(allowed)}")]
    quota = cpu_quota(host)
    if quota < len(allowed):
        findings.append(
            warning(
                CPUSET,
                f"a quota of {quota:g} CPUs' time on {len(allowed)} CPUs: the kernel stops threads "
                "that wait for each other",
                "limit with a cpuset (compose: cpuset) instead of a quota (compose: cpus)",
            )
        )
    return findings


def cpu_quota(host: Host) -> float:
    """CPUs' worth of time that the control group grants; infinity: no limit."""
    limit, _, period = host.text(f"/sys/fs/cgroup{own_group(host)}/cpu.max").partition(" ")
    if limit.isdigit() and period.isdigit():
        return int(limit) / int(period)
    limit = host.text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = host.text("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if limit.isdigit() and period.isdigit():
        return int(limit) / int(period)
    return math.inf


def own_group(host: Host) -> str:
    """Path of this process's control group (version 2) below /sys/fs/cgroup; empty for the root."""
    for line in host.text("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return line[3:].rstrip("/")
    return ""


def _core(host: Host, cpu: int) -> tuple[str, str]:
    """Package and core of a CPU; a CPU of its own where the kernel does not tell."""
    folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
    core = host.text(f"{folder}/core_id")
    return host.text(f"{folder}/physical_package_id"), core or f"cpu {cpu}"
