"""Each check of `headwater doctor` on invented machines, and the report made of them."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest

from headwater.cli.doctor import as_json, line, summary, worst
from headwater.doctor import cpu, gpu, measure, memory, software, storage
from headwater.doctor.finding import Finding, Level, error, ok, warning
from headwater.doctor.gpu import CudaFacts, GpuFacts
from headwater.doctor.host import Host, parse_list, selected, shown
from headwater.doctor.memory import NodeRate, ShmSpace
from headwater.doctor.software import Port

GIB = 2**30


def make_host(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level.value for finding in findings]


def texts(findings: list[Finding]) -> str:
    return "\n".join(f"{finding.text} -> {finding.remedy}" for finding in findings)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3", (0, 1, 2, 3)), ("0,2-3,7", (0, 2, 3, 7)), ("", ()), ("5", (5,))],
)
def test_lists_of_cpus(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers
    assert shown(numbers) == text


def test_a_choice_among_several() -> None:
    assert selected("always [madvise] never") == "madvise"
    assert selected("") == ""


ZEN4 = "flags : avx2 fma f16c avx512f avx512bw avx512vl avx512vbmi avx512_bf16"


def test_isa(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/proc/cpuinfo": ZEN4})
    fast = cpu.check_isa(host, "avx512", ("avx512", "avx2", "scalar"), "", "")
    assert levels(fast) == ["ok"]
    assert "avx512 kernels run" in fast[0].text
    forced = cpu.check_isa(host, "scalar", ("avx512", "avx2", "scalar"), "scalar", "")
    assert levels(forced) == ["warning"]
    assert "unset HEADWATER_FORCE_ISA" in forced[0].remedy
    unknown = cpu.check_isa(host, "", ("avx512", "scalar"), "mmx", "")
    assert levels(unknown) == ["error"]
    assert "avx512, scalar" in unknown[0].remedy
    wrong = cpu.check_isa(host, "avx512", ("avx512", "avx2", "scalar"), "", "linear differs")
    assert levels(wrong) == ["ok", "error"]


def test_isa_that_is_slow_or_kept_from_us(tmp_path: Path) -> None:
    old = make_host(tmp_path / "old", {"/proc/cpuinfo": "flags : avx2 fma f16c"})
    assert levels(cpu.check_isa(old, "avx2", ("avx2", "scalar"), "", "")) == ["warning"]
    flags = f"{ZEN4} amx_tile amx_bf16 avx512_fp16 gfni"
    tiles = make_host(tmp_path / "new", {"/proc/cpuinfo": flags})
    findings = cpu.check_isa(tiles, "avx512", ("avx512", "avx2", "scalar"), "", "")
    assert levels(findings) == ["ok", "warning"]
    assert "the CPU has amx" in findings[1].text


def test_cores(tmp_path: Path) -> None:
    files = {"/sys/devices/system/cpu/online": "0-3"}
    for number, core in enumerate((0, 1, 0, 1)):
        files[f"/sys/devices/system/cpu/cpu{number}/topology/core_id"] = str(core)
    host = make_host(tmp_path, files)
    both = cpu.check_cores(host, (0, 1, 2, 3), {"decode.threads": 0})
    assert levels(both) == ["ok"]
    assert "4 of 4 CPUs may be used, on 2 cores" in both[0].text
    assert levels(cpu.check_cores(host, (0,), {})) == ["warning"]
    crowded = cpu.check_cores(host, (0, 1), {"decode.threads": 3, "prefill.threads": 2})
    assert levels(crowded) == ["ok", "warning"]
    assert "decode.threads is 3, more than the 2 CPUs" in crowded[1].text


def test_cpuset_and_quota(tmp_path: Path) -> None:
    files = {
        "/sys/devices/system/cpu/online": "0-7",
        "/proc/self/cgroup": "0::/box",
        "/sys/fs/cgroup/box/cpu.max": "150000 100000",
    }
    host = make_host(tmp_path, files)
    findings = cpu.check_cpuset(host, (2, 3))
    assert levels(findings) == ["ok", "warning"]
    assert "pinned to CPUs 2-3" in findings[0].text
    assert "a quota of 1.5 CPUs' time on 2 CPUs" in findings[1].text
    assert cpu.cpu_quota(make_host(tmp_path / "none", {})) == math.inf
    old = {
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert cpu.cpu_quota(make_host(tmp_path / "v1", old)) == 4.0
    assert levels(cpu.check_cpuset(make_host(tmp_path / "whole", {}), (0, 1))) == ["ok"]


def test_numa(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/proc/sys/kernel/numa_balancing": "1"})
    even = (NodeRate(0, (0, 1), 100.0), NodeRate(1, (2, 3), 98.0))
    findings = memory.check_numa(host, (0, 1), even)
    assert levels(findings) == ["ok", "ok", "warning"]
    assert "node 1: 98.0 GB/s read by 2 CPUs (2-3)" in findings[1].text
    assert "kernel.numa_balancing=0" in findings[2].remedy
    uneven = (NodeRate(0, (0, 1), 100.0), NodeRate(1, (2, 3), 50.0))
    assert levels(memory.check_numa(host, (0, 1), uneven))[:2] == ["ok", "warning"]
    alone = memory.check_numa(host, (0,), (NodeRate(0, (0,), 20.0),))
    assert levels(alone) == ["ok"]
    unreachable = memory.check_numa(host, (0, 1), (NodeRate(0, (0, 1), 100.0),))
    assert "node 1: none of its CPUs may be used" in texts(unreachable)


@pytest.mark.parametrize(
    ("enabled", "shmem", "expected"),
    [
        ("always [madvise] never", "always within_size [advise] never", ["ok", "ok"]),
        ("always [madvise] never", "always advise [never] deny force", ["warning", "ok"]),
        ("always madvise [never]", "[always] never", ["ok", "warning"]),
        ("", "", ["warning"]),
    ],
)
def test_huge_pages(tmp_path: Path, enabled: str, shmem: str, expected: list[str]) -> None:
    folder = "/sys/kernel/mm/transparent_hugepage"
    files = {f"{folder}/enabled": enabled, f"{folder}/shmem_enabled": shmem} if enabled else {}
    assert levels(memory.check_huge_pages(make_host(tmp_path, files))) == expected


def test_room_in_shared_memory() -> None:
    space = ShmSpace(64 * GIB, 30 * GIB, 0)
    assert levels(memory.check_shm(space, 20 * GIB, "the model M")) == ["ok"]
    [full] = memory.check_shm(space, 40 * GIB, "the model M")
    assert full.level is Level.ERROR
    assert "the model M takes 40.0 GiB, 10.0 GiB too much" in full.text
    # What is loaded already need not find room again.
    assert levels(memory.check_shm(ShmSpace(64 * GIB, 0, 40 * GIB), 40 * GIB, "M")) == ["ok"]
    assert levels(memory.check_shm(None, 0, "M")) == ["error"]


def test_memory_of_the_machine(tmp_path: Path) -> None:
    meminfo = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB"
    host = make_host(tmp_path, {"/proc/meminfo": meminfo})
    [found] = memory.check_ram(host, 0, 20 * GIB, "the model M")
    assert (found.level, found.text) == (Level.OK, "64.0 GiB, 32.0 GiB available")
    assert levels(memory.check_ram(host, 0, 40 * GIB, "the model M")) == ["error"]
    assert levels(memory.check_ram(host, 40 * GIB, 40 * GIB, "the model M")) == ["ok"]


def test_memlock() -> None:
    assert levels(memory.check_memlock(None, has_gpu=True)) == ["ok"]
    assert levels(memory.check_memlock(8 << 20, has_gpu=False)) == ["ok"]
    [limited] = memory.check_memlock(8 << 20, has_gpu=True)
    assert limited.level is Level.WARNING
    assert "memlock: -1" in limited.remedy


def test_sys_nice(tmp_path: Path) -> None:
    with_it = make_host(tmp_path / "a", {"/proc/self/status": f"CapEff:\t{1 << 23:016x}"})
    without = make_host(tmp_path / "b", {"/proc/self/status": "CapEff:\t0000000000000000"})
    [held] = memory.check_sys_nice(with_it, 2, "")
    assert (held.level, held.text) == (Level.OK, "held; pages can be bound to NUMA nodes")
    [refused] = memory.check_sys_nice(without, 2, "Operation not permitted")
    assert refused.level is Level.ERROR
    assert "cap_add: [SYS_NICE]" in refused.remedy
    assert levels(memory.check_sys_nice(without, 1, "Operation not permitted")) == ["ok"]


H200 = GpuFacts(0, "H200", (9, 0), 140 * GIB, 139 * GIB, "0000:0a:00.0", "", 55.3)
LINK = "/sys/bus/pci/devices/0000:0a:00.0"


def cuda(*devices: GpuFacts, demanded_by: tuple[str, ...] = ()) -> CudaFacts:
    return CudaFacts(demanded_by, "2.11.0", "13.0", devices)


def test_no_gpu(tmp_path: Path) -> None:
    bare = make_host(tmp_path / "bare", {})
    assert levels(gpu.check_gpus(bare, cuda())) == ["ok"]
    [missing] = gpu.check_gpus(bare, cuda(demanded_by=("gpu.prefill", "gpu.decode")))
    assert missing.level is Level.ERROR
    assert missing.text == "none, but gpu.prefill and gpu.decode demand one"
    assert gpu.check_driver(bare, cuda())[0].text == "none, and none needed"
    hidden = make_host(tmp_path / "hidden", {"/dev/nvidia0": ""})
    [unseen] = gpu.check_gpus(hidden, cuda())
    assert unseen.level is Level.WARNING
    assert "torch 2.11.0 does not see it" in unseen.text


def test_a_gpu_and_its_link(tmp_path: Path) -> None:
    files = {
        f"{LINK}/current_link_width": "16",
        f"{LINK}/max_link_width": "16",
        f"{LINK}/current_link_speed": "32.0 GT/s PCIe",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64  580.95.05  Tue\nGCC",
    }
    host = make_host(tmp_path, files)
    assert levels(gpu.check_gpus(host, cuda(H200))) == ["ok"]
    assert gpu.check_driver(host, cuda(H200))[0].text == "NVIDIA 580.95.05; torch for CUDA 13.0"
    width, rate = gpu.check_links(host, cuda(H200))
    assert (width.level, width.text) == (Level.OK, "0: x16 of x16, 32.0 GT/s PCIe")
    assert rate.level is Level.OK
    assert "55.3 GB/s from registered shared memory, 88% of the link's 63.0" in rate.text


def test_a_gpu_on_half_a_link_that_is_slow_or_too_old(tmp_path: Path) -> None:
    files = {
        f"{LINK}/current_link_width": "8",
        f"{LINK}/max_link_width": "16",
        f"{LINK}/current_link_speed": "32.0 GT/s PCIe",
    }
    slow = GpuFacts(0, "H200", (9, 0), GIB, GIB, "0000:0a:00.0", "", 12.0)
    host = make_host(tmp_path, files)
    assert levels(gpu.check_links(host, cuda(slow))) == ["warning", "warning"]
    silent = make_host(tmp_path / "silent", {})
    assert levels(gpu.check_links(silent, cuda(H200))) == ["warning", "ok"]
    broken = GpuFacts(0, "X", (9, 0), GIB, GIB, "", "", None, "cudaHostRegister refused")
    assert levels(gpu.check_links(silent, cuda(broken))) == ["warning", "error"]
    old = GpuFacts(0, "X", (7, 5), GIB, GIB, "", "gpu.device: X is too old", 10.0)
    assert levels(gpu.check_gpus(host, cuda(old))) == ["warning"]
    assert levels(gpu.check_gpus(host, cuda(old, demanded_by=("gpu.decode",)))) == ["error"]


def test_disk_and_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(8192))
    [found] = storage.check_model(str(tmp_path), [weights])
    assert found.level is Level.OK
    assert "1 files of weights" in found.text
    assert levels(storage.check_model("/nowhere", [])) == ["error"]
    assert levels(storage.check_model("", [])) == ["ok"]
    [fast] = storage.check_disk(5.0, 50 * 10**9, "the model M")
    assert (fast.level, fast.text) == (
        Level.OK,
        "5.00 GB/s; the model M, 46.6 GiB, loads in 10 s or more",
    )
    assert levels(storage.check_disk(0.1, GIB, "M")) == ["warning"]
    assert "not measured" in storage.check_disk(None, GIB, "M")[0].text
    assert "not on disk" in storage.check_disk(None, 0, "M")[0].text


def test_ports() -> None:
    ports = (
        Port("router.listen", "127.0.0.1:1"),
        Port("decode.listen", "127.0.0.1:2", "Address already in use", owner_pid=7),
        Port("prefill.listen", "127.0.0.1:3", "Address already in use"),
    )
    findings = software.check_ports(ports)
    assert levels(findings) == ["ok", "ok", "error"]
    assert "in use by this stack (pid 7)" in findings[1].text
    assert "prefill.listen" in findings[2].remedy


def test_versions() -> None:
    packages = {"headwater": "0.1.0", "torch": ""}
    findings = software.check_versions((3, 11, 2), "6.1.0", packages, {"torch": "engines need it"})
    assert levels(findings) == ["ok", "error"]
    assert findings[0].text == "Python 3.11.2, Linux 6.1.0, headwater 0.1.0"
    assert findings[1].remedy == "pip install torch"
    assert levels(software.check_versions((3, 10, 1), "6.1.0", {}, {})) == ["error"]


def test_measurements_tell_of_this_machine(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert measure.bind_error(address) == os.strerror(98)
    assert measure.bind_error(address) == ""
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    rate = measure.disk_gb_per_s([file])
    assert rate is None or rate > 0.0
    assert measure.disk_gb_per_s([]) is None
    space = measure.shm_space("headwater-doctor-test.")
    assert space is not None
    assert 0 <= space.free_bytes <= space.total_bytes
    assert measure.shm_space("x", tmp_path / "missing") is None
    before = os.sched_getaffinity(0)
    [found] = measure.node_rates(make_host(tmp_path, {}), (0,), (min(before),))
    assert found.gb_per_s > 0.0
    assert found.cpus == (min(before),)
    assert os.sched_getaffinity(0) == before


def test_the_report() -> None:
    findings = [ok("a", "fine"), warning("b", "slow", "do this"), error("c", "broken", "do that")]
    assert summary(findings) == "1 ok, 1 warning, 1 error"
    assert [worst(findings[:count]).exit_status for count in range(4)] == [0, 0, 1, 2]
    assert line(findings[1]).plain.splitlines()[1].strip() == "-> do this"
    report = as_json(findings)
    assert report["level"] == "error"
    assert json.loads(json.dumps(report))["findings"][2] == {
        "topic": "c",
        "level": "error",
        "text": "broken",
        "remedy": "do that",
    }
