"""Load plans: layout, placement of parts, refusals, and the memory plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import CheckpointError, SharedMemoryFullError
from headwater.weights.checkpoint import Checkpoint, CheckpointTensor
from headwater.weights.memory import MemoryPlan, plan_memory
from headwater.weights.plan import find_part, plan_load
from headwater.weights.tensors import DType, TensorPart, TensorSpec

FILE = Path("folder/model.safetensors")


def checkpoint(**tensors: tuple[str, tuple[int, ...], int]) -> Checkpoint:
    found = {
        name: CheckpointTensor(name, dtype, shape, FILE, 1000, num_bytes)
        for name, (dtype, shape, num_bytes) in tensors.items()
    }
    return Checkpoint(Path("folder"), "{}", found, bytes(32))


def whole(name: str, shape: tuple[int, ...], *dtypes: DType) -> TensorSpec:
    return TensorSpec(name, shape, dtypes or (DType.F32,), (TensorPart(name),))


def stack() -> TensorSpec:
    parts = tuple(TensorPart(f"t{e}{i}", (e, i)) for e in range(2) for i in range(2))
    return TensorSpec("stack", (2, 2, 3, 4), (DType.BF16, DType.F8_E4M3), parts)


def stack_tensors(dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...], int]]:
    item_bytes = DType(dtype).item_bytes
    return {f"t{e}{i}": (dtype, (3, 4), 12 * item_bytes) for e in range(2) for i in range(2)}


def test_tensors_lie_page_aligned_in_order_with_the_manifest_behind() -> None:
    plan = plan_load(
        [whole("a", (3,)), whole("b", (2, 2))],
        checkpoint(a=("F32", (3,), 12), b=("F32", (2, 2), 16)),
    )
    assert [(e.name, e.offset) for e in plan.entries] == [("a", 4096), ("b", 8192)]
    assert plan.manifest_offset == 8192 + 16
    assert plan.payload_bytes == plan.manifest_offset + len(plan.manifest)


def test_parts_go_where_their_index_says() -> None:
    plan = plan_load([stack()], checkpoint(**stack_tensors("F8_E4M3")))
    assert plan.entries[0].dtype is DType.F8_E4M3
    assert [p.dest_offset for p in plan.pieces] == [4096, 4096 + 12, 4096 + 24, 4096 + 36]
    assert {(p.path, p.file_offset, p.num_bytes) for p in plan.pieces} == {(str(FILE), 1000, 12)}


def test_an_element_is_traced_to_its_part() -> None:
    assert find_part(stack(), 0).source == "t00"
    assert find_part(stack(), 23).source == "t01"
    assert find_part(stack(), 47).source == "t11"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "folder: tensor 'a' is missing"),
        ({"a": ("F16", (3,), 6)}, "tensor 'a': field 'dtype': expected F32 or BF16, got F16"),
        ({"a": ("F32", (4,), 16)}, r"tensor 'a': field 'shape': expected \[3\].*, got \[4\]"),
    ],
)
def test_misfits_are_refused_by_name(
    tensors: dict[str, tuple[str, tuple[int, ...], int]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_load([whole("a", (3,), DType.F32, DType.BF16)], checkpoint(**tensors))


def test_parts_of_one_tensor_share_a_dtype() -> None:
    tensors = stack_tensors() | {"t10": ("F8_E4M3", (3, 4), 12)}
    with pytest.raises(CheckpointError, match=r"tensor 't10'.*expected BF16 as in 't00'.*'stack'"):
        plan_load([stack()], checkpoint(**tensors))


def test_the_digest_follows_checkpoint_and_list() -> None:
    source = checkpoint(a=("F32", (3,), 12), b=("F32", (3,), 12))
    specs = [whole("a", (3,)), whole("b", (3,))]
    assert plan_load(specs, source).digest == plan_load(specs, source).digest
    assert plan_load(specs[:1], source).digest != plan_load(specs, source).digest
    other = Checkpoint(source.folder, "{}", source.tensors, bytes([1] * 32))
    assert plan_load(specs, other).digest != plan_load(specs, source).digest


def test_the_memory_plan_names_place_and_exact_shortfall() -> None:
    MemoryPlan(100, 100, 100).check("w")
    with pytest.raises(SharedMemoryFullError, match=r"'w': /dev/shm .* needs 100 .* 1 short"):
        MemoryPlan(100, 99, 100).check("w")
    with pytest.raises(SharedMemoryFullError, match=r"'w': RAM .* needs 100 .* 60 short"):
        MemoryPlan(100, 100, 40).check("w")
    assert "weights need 0.50 GiB" in str(MemoryPlan(1 << 29, 0, 0))


def test_the_memory_plan_sees_the_machine() -> None:
    plan = plan_memory(1)
    assert plan.shm_available_bytes > 0
    assert plan.ram_available_bytes > 0
