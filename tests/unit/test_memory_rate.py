"""How much must be read to tell of memory and not of caches."""

from __future__ import annotations

from pathlib import Path

from headwater.memory_rate import last_level_cache_bytes, telling_bytes

MIB = 2**20


def write_cache(root: Path, cpu: int, level: int, size: str, sharers: str) -> None:
    folder = root / f"cpu{cpu}/cache/index{level}"
    folder.mkdir(parents=True)
    (folder / "level").write_text(f"{level}\n")
    (folder / "size").write_text(f"{size}\n")
    (folder / "shared_cpu_list").write_text(f"{sharers}\n")


def test_each_last_level_cache_counts_once(tmp_path: Path) -> None:
    for cpu, sharers in enumerate(("0-1", "0-1", "2-3", "2-3")):
        write_cache(tmp_path, cpu, 2, "1024K", str(cpu))
        write_cache(tmp_path, cpu, 3, "32M", sharers)
    assert last_level_cache_bytes((0, 1), tmp_path) == 32 * MIB
    assert last_level_cache_bytes((0, 1, 2), tmp_path) == 64 * MIB
    assert last_level_cache_bytes((9,), tmp_path) == 0


def test_reads_are_longer_than_caches_within_bounds() -> None:
    assert telling_bytes(0) == 256 * MIB
    assert telling_bytes(100 * MIB) == 400 * MIB
    assert telling_bytes(8192 * MIB) == 4096 * MIB
