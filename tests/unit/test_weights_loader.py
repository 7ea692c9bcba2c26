"""Loading into shared memory: contents, re-attaching, one copy, and what is left after failures."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headwater import shm
from headwater._native import LoadJob
from headwater.errors import CancelledError, CheckpointError, SegmentError, UnavailableError
from headwater.shm import Lifetime, Piece, Segment, SegmentKind
from headwater.weights.loader import load_weights
from headwater.weights.store import WeightsStore
from headwater.weights.tensors import DType, TensorPart, TensorSpec

EXPERTS = 3
BIG = (96, 4096)

SPECS = (
    TensorSpec("norm", (5,), (DType.F32,), (TensorPart("model.norm"),)),
    TensorSpec(
        "experts",
        (EXPERTS, *BIG),
        (DType.BF16,),
        tuple(TensorPart(f"w{e}", (e,)) for e in range(EXPERTS)),
    ),
    TensorSpec("fp8", (130, 129), (DType.F8_E4M3,), (TensorPart("q"),)),
    TensorSpec(
        "fp8.scale", (2, 2, 2), (DType.F32,), tuple(TensorPart(f"s{e}", (e,)) for e in range(2))
    ),
)


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"w{e}": torch.randn(BIG, generator=generator).bfloat16() for e in range(EXPERTS)}
    tensors["model.norm"] = torch.randn(5, generator=generator)
    tensors["q"] = torch.randn(130, 129, generator=generator).to(torch.float8_e4m3fn)
    tensors |= {f"s{e}": torch.rand(2, 2, generator=generator) for e in range(2)}
    return tensors


def write_model(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path, make_tensors())


def test_every_byte_arrives(model_dir: Path, shm_prefix: str) -> None:
    progress: list[tuple[int, int]] = []
    store = load_weights(
        model_dir, SPECS, shm_prefix=shm_prefix, on_progress=lambda *done: progress.append(done)
    )
    tensors = make_tensors()
    assert torch.equal(store.tensor("norm"), tensors["model.norm"])
    for e in range(EXPERTS):
        assert torch.equal(store.tensor("experts")[e], tensors[f"w{e}"])
    found = store.tensor("fp8")
    assert (found.dtype, found.shape) == (torch.float8_e4m3fn, (130, 129))
    assert torch.equal(found.view(torch.uint8), tensors["q"].view(torch.uint8))
    assert progress[-1][0] == progress[-1][1] > 0
    assert store.config_json == '{"model_type": "tiny"}'
    assert not store.was_reattached
    assert store.segment.is_sealed
    assert store.segment.name.startswith(f"{shm_prefix}.weights.")
    assert "norm" in store
    assert "lm_head" not in store
    with pytest.raises(SegmentError, match="holds no tensor 'lm_head'"):
        store.tensor("lm_head")
    store.close()


def test_tensors_are_views_that_outlive_the_store(model_dir: Path, shm_prefix: str) -> None:
    store = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    first, second = store.tensor("norm"), store.tensor("norm")
    assert first.data_ptr() == second.data_ptr()
    store.close()
    del store, second
    gc.collect()
    assert torch.equal(first, make_tensors()["model.norm"])


def test_a_second_start_finds_the_weights_without_the_files(
    model_dir: Path, shm_prefix: str
) -> None:
    first = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    first.close()
    # The data, header aside, is now garbage of the same size and age: nobody may read it.
    path = model_dir / "model.safetensors"
    status = path.stat()
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.seek(header_bytes)
        file.write(b"\xff" * (status.st_size - header_bytes))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    assert second.was_reattached
    assert second.segment.is_owner
    assert second.config_json == '{"model_type": "tiny"}'
    assert torch.equal(second.tensor("norm"), make_tensors()["model.norm"])
    second.close()


def test_living_owners_share(model_dir: Path, shm_prefix: str) -> None:
    first = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    second = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    assert (first.segment.is_owner, second.segment.is_owner) == (True, False)
    assert second.segment.name == first.segment.name
    first.close()
    second.close()


def test_others_attach_by_handle_and_entries(model_dir: Path, shm_prefix: str) -> None:
    owner = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    other = WeightsStore.attach(owner.handle, owner.entries.values(), owner.config_json)
    assert torch.equal(other.tensor("experts"), owner.tensor("experts"))
    stale = dataclasses.replace(owner.handle, digest=bytes([1] * 32))
    with pytest.raises(SegmentError, match="check 'digest' failed"):
        WeightsStore.attach(stale, ())
    other.close()
    owner.close()


def test_another_checkpoint_gets_another_segment(tmp_path: Path, shm_prefix: str) -> None:
    names = set()
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        store = load_weights(write_model(folder, make_tensors()), SPECS, shm_prefix=shm_prefix)
        names.add(store.segment.name)
        store.close()
    assert len(names) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_bad_scale_is_refused_by_name(tmp_path: Path, shm_prefix: str, bad: float) -> None:
    tensors = make_tensors()
    tensors["s1"][0, 1] = bad
    write_model(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"tensor 's1': holds the scale {bad}"):
        load_weights(tmp_path, SPECS, shm_prefix=shm_prefix)
    assert shm.list_segments(f"{shm_prefix}.") == []


def test_a_failure_midway_leaves_nothing(model_dir: Path, shm_prefix: str) -> None:
    def fail() -> bool:
        raise KeyError("midway")

    with pytest.raises(KeyError, match="midway"):
        load_weights(model_dir, SPECS, shm_prefix=shm_prefix, should_stop=fail)
    assert shm.list_segments(f"{shm_prefix}.") == []


def test_a_load_in_progress_elsewhere_is_reported(model_dir: Path, shm_prefix: str) -> None:
    store = load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    name, handle = store.segment.name, store.handle
    store.segment.unlink()
    store.close()
    other = Segment.create(
        name, 4096, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.PERSISTENT, digest=handle.digest
    )
    with pytest.raises(UnavailableError, match="another process is loading"):
        load_weights(model_dir, SPECS, shm_prefix=shm_prefix)
    other.close()
    # That loader is gone without an end: its remains are no obstacle.
    load_weights(model_dir, SPECS, shm_prefix=shm_prefix).close()


def test_a_cancelled_job_says_how_far_it_came(tmp_path: Path, shm_prefix: str) -> None:
    path = tmp_path / "zeros"
    num_bytes = 64 << 20
    with path.open("wb") as file:
        file.truncate(num_bytes)
    with Segment.create(
        f"{shm_prefix}.w", num_bytes, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.BOUND
    ) as segment:
        # Chunk after chunk of one byte each: far too many to be done before the cancellation.
        pieces = [Piece(str(path), i, 1, i) for i in range(300_000)]
        job = segment.start_load(pieces, threads=1)
        job.cancel()
        with pytest.raises(CancelledError, match=r"cancelled after \d+ of 300000 bytes"):
            wait_for(job)


def test_a_short_file_is_refused_before_reading(tmp_path: Path, shm_prefix: str) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"12345678")
    with Segment.create(
        f"{shm_prefix}.w", 4096, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.BOUND
    ) as segment:
        with pytest.raises(CheckpointError, match="has 8 bytes, but 5 are needed at offset 4"):
            segment.start_load([Piece(str(path), 4, 5, 0)], threads=1)
        with pytest.raises(SegmentError, match="outside its payload"):
            segment.start_load([Piece(str(path), 0, 8, 4090)], threads=1)
        with pytest.raises(CheckpointError, match="gone: cannot open it: No such file"):
            segment.start_load([Piece(str(tmp_path / "gone"), 0, 1, 0)], threads=1)


def test_a_load_leaves_one_copy_in_memory(tmp_path: Path, shm_prefix: str) -> None:
    """The bytes are in the segment, and none of the file's pages stays in the page cache."""
    path = tmp_path / "data"
    content = np.random.default_rng(2).integers(0, 256, 24 << 20, dtype=np.uint8)
    with path.open("wb") as file:
        file.write(content.tobytes())
        file.flush()
        os.fsync(file.fileno())  # dirty pages cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path) > content.nbytes // 20:
        pytest.skip("this file system keeps its pages, as tmpfs does")
    assert path.read_bytes() == content.tobytes()
    assert cached_bytes(path) == content.nbytes
    with Segment.create(
        f"{shm_prefix}.w", content.nbytes, kind=SegmentKind.WEIGHTS, lifetime=Lifetime.BOUND
    ) as segment:
        wait_for(segment.start_load([Piece(str(path), 0, content.nbytes, 0)], threads=2))
        view = np.frombuffer(memoryview(segment.view(0, content.nbytes)), dtype=np.uint8)
        assert np.array_equal(view, content)
        del view
    assert cached_bytes(path) < content.nbytes // 20


def wait_for(job: LoadJob) -> None:
    while not job.wait(1000):
        pass


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds."""
    with path.open("rb") as file:
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    is_resident = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(mapped.ctypes.data),
        ctypes.c_size_t(mapped.nbytes),
        ctypes.c_void_p(is_resident.ctypes.data),
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return int((is_resident & 1).sum()) * mmap.PAGESIZE
