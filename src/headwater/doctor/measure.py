"""Measurements that the checks judge: memory, disk, GPU, ports. Takes a few seconds in all.

Each gives what it found, or why it could not be found, and leaves the machine as it was.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.doctor.gpu import CudaFacts, GpuFacts
from headwater.doctor.host import Host, parse_list
from headwater.doctor.memory import NodeRate, ShmSpace
from headwater.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:
    from collections.abc import Callable

_DISK_BYTES = 512 << 20
_DISK_PIECE = 8 << 20
_DISK_THREADS = 4
_H2D_BYTES = 512 << 20
# x86-64 system call number, and linux/mempolicy.h: MPOL_PREFERRED
_SYS_MBIND = 237
_MPOL_PREFERRED = 1


def node_rates(host: Host, nodes: tuple[int, ...], allowed: tuple[int, ...]) -> list[NodeRate]:
    """What the allowed CPUs of each node read from memory of that node, one node at a time."""
    rates = []
    for node in nodes:
        cpus = parse_list(host.text(f"/sys/devices/system/node/node{node}/cpulist")) or allowed
        usable = tuple(cpu for cpu in cpus if cpu in allowed)
        if usable:
            rates.append(NodeRate(node, usable, _read_gb_per_s(usable)))
    return rates


def _read_gb_per_s(cpus: tuple[int, ...]) -> float:
    from headwater.bench.timing import huge_buffer, worker_pool
    from headwater.memory_rate import last_level_cache_bytes, read_rate, telling_bytes

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        with worker_pool(len(cpus)) as pool:
            # Written by a thread of the node, so that the kernel takes pages of the node.
            buffer = huge_buffer(telling_bytes(last_level_cache_bytes(cpus)))
            return read_rate(pool, buffer.data_ptr(), buffer.numel()) / 1e9
    finally:
        os.sched_setaffinity(0, before)


def bind_problem(node: int) -> str:
    """Tries to bind a page of its own to `node`; empty when it may, else what the kernel says."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        mask = ctypes.c_ulong(1 << node)
        result = libc.syscall(
            ctypes.c_long(_SYS_MBIND),
            ctypes.c_void_p(address),
            ctypes.c_ulong(mmap.PAGESIZE),
            ctypes.c_int(_MPOL_PREFERRED),
            ctypes.byref(mask),
            ctypes.c_ulong(8 * ctypes.sizeof(mask)),
            ctypes.c_uint(0),
        )
        return "" if result == 0 else os.strerror(ctypes.get_errno())


def shm_space(own_prefix: str, folder: Path = Path("/dev/shm")) -> ShmSpace | None:
    """Size and room; None when the folder is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    own = sum(path.stat().st_blocks * 512 for path in folder.glob(f"{own_prefix}*"))
    return ShmSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, own)


def disk_gb_per_s(files: list[Path]) -> float | None:
    """Reads up to half a GiB of the largest file past the page cache, four pieces at a time.

    None when there is no file, or its file system cannot do that.
    """
    if not files:
        return None
    path = max(files, key=lambda each: each.stat().st_size)
    size = min(path.stat().st_size, _DISK_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        began_at = time.perf_counter()
        with ThreadPoolExecutor(_DISK_THREADS) as pool:
            starts = range(0, size, _DISK_PIECE)
            num_bytes = sum(pool.map(lambda start: _read_piece(descriptor, start, size), starts))
        return num_bytes / (time.perf_counter() - began_at) / 1e9
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read_piece(descriptor: int, start: int, size: int) -> int:
    # Direct reads need aligned memory, which a mapping is.
    with mmap.mmap(-1, min(_DISK_PIECE, size - start)) as piece:
        return os.preadv(descriptor, [piece], start)


def bind_error(address: str) -> str:
    """Why nobody could listen at host:port now; empty: it could be done."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
        except OSError as problem:
            return problem.strerror or str(problem)
    return ""


def cuda_facts(demanded_by: tuple[str, ...], vram_gib: float) -> CudaFacts:
    """The CUDA devices that torch sees, with the rate of copies to each."""
    try:
        import torch
    except ImportError:
        return CudaFacts(demanded_by, "", "", ())
    cuda = str(torch.version.cuda or "")
    if not torch.cuda.is_available():
        return CudaFacts(demanded_by, torch.__version__, cuda, ())
    devices = tuple(_gpu_facts(i, vram_gib) for i in range(torch.cuda.device_count()))
    return CudaFacts(demanded_by, torch.__version__, cuda, devices)


def _gpu_facts(index: int, vram_gib: float) -> GpuFacts:
    import torch

    from headwater.gpu.device import find_gpu

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    problem = ""
    try:
        find_gpu(index, vram_gib)
    except ConfigError as error:
        problem = str(error)
    rate, h2d_problem = _tried(lambda: _h2d_gb_per_s(index))
    address = "{:04x}:{:02x}:{:02x}.0".format(
        *(getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    )
    return GpuFacts(
        index,
        properties.name,
        (properties.major, properties.minor),
        total,
        free,
        address,
        problem,
        rate,
        h2d_problem,
    )


def _tried(measure: Callable[[], float]) -> tuple[float | None, str]:
    try:
        return measure(), ""
    except (HeadwaterError, OSError, RuntimeError) as problem:
        return None, str(problem).partition("\n")[0]


def _h2d_gb_per_s(index: int) -> float:
    """Copies from shared memory that is registered as the weights are."""
    import torch

    from headwater.bench.gpu.link import link_gb_per_s
    from headwater.gpu.host_ranges import HostRange, RegisteredRanges

    device = torch.device("cuda", index)
    descriptor = os.memfd_create("headwater-doctor")
    try:
        os.truncate(descriptor, _H2D_BYTES)
        region = mmap.mmap(descriptor, _H2D_BYTES)
    finally:
        os.close(descriptor)
    source = torch.frombuffer(region, dtype=torch.uint8)
    source.fill_(1)
    with torch.cuda.device(device):
        # A device that was never used has no context yet, and none means no registration.
        torch.cuda.init()
        torch.zeros(1, device=device)
        ranges = RegisteredRanges([HostRange(source.data_ptr(), _H2D_BYTES)])
        ranges.start()
        try:
            ranges.wait(0)
            return link_gb_per_s([source], device)
        finally:
            torch.cuda.synchronize(device)
            ranges.close()
