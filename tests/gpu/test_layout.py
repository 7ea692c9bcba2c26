"""How a model is cut into items and its memory shared out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.bench.gpu.random_model import RandomModel
from headwater.bench.gpu.slp import FP8
from headwater.errors import ResourceError
from headwater.gpu.host_ranges import HostRange, page_range
from headwater.gpu.layout import ModelLayout, expert_range, lay_out, view_parts
from headwater.gpu.memory_plan import (
    SLICE_TOKENS,
    MemoryPlan,
    fixed_bytes,
    plan_memory,
    token_bytes,
)
from headwater.model.layer_spec import MoeFfnSpec
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config

GIB = 2**30


class _Weights(dict[str, Tensor]):
    def tensor(self, name: str) -> Tensor:
        return self[name]


def _tiny(shards: int = 1, experts: int = 16) -> tuple[ModelSpec, _Weights]:
    config = make_config("tiny", "deepseek_v3", layers=4, experts=experts)
    spec = ModelSpec.from_config(config, "config.json")
    weights = _Weights()
    for tensor in spec.tensors(shards):
        weights[tensor.name] = torch.randn(tensor.shape).bfloat16()
    return spec, weights


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_items_hold_every_byte_of_every_layer_once(shards: int, ranks: int) -> None:
    spec, weights = _tiny(shards)
    for layer in range(spec.num_layers):
        expected = {n: t for n, t in weights.items() if n.startswith(f"layers.{layer}.")}
        found: dict[str, list[Tensor]] = {}
        for rank in range(ranks):
            layout = lay_out(spec, weights, rank=rank, world_size=ranks, group_bytes=600_000)
            items = {item.key: item for item in layout.items}
            mine = layout.layers[layer]
            dense = view_parts(items[mine.dense_key].parts, mine.dense_views)
            for name, part in dense.items():
                assert torch.equal(part, expected[f"layers.{layer}.{name}"])
            for group in mine.groups:
                for name, part in view_parts(items[group.key].parts, group.views).items():
                    assert part.shape[0] == group.count
                    found.setdefault(name, []).append(part)
        for name, parts in found.items():
            assert torch.equal(torch.cat(parts), expected[f"layers.{layer}.experts.{name}"])
        assert len(found) == (2 if layer >= 2 else 0)


def test_ranks_share_experts_as_evenly_as_can_be() -> None:
    for experts, ranks in ((256, 2), (7, 3), (2, 3)):
        shares = [expert_range(experts, rank, ranks) for rank in range(ranks)]
        assert [e for share in shares for e in share] == list(range(experts))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_groups_of_a_layer_are_about_equal() -> None:
    spec, weights = _tiny(experts=10)
    layout = lay_out(spec, weights, group_bytes=4 * 3 * 256 * 256 * 2)
    assert [group.count for group in layout.layers[2].groups] == [3, 3, 4]


def test_ranges_are_whole_pages() -> None:
    assert page_range(4096, 4096) == HostRange(4096, 4096)
    assert page_range(4097, 1) == HostRange(4096, 4096)
    assert page_range(8191, 2) == HostRange(4096, 8192)


class _Sizes:
    """A layout of DeepSeek-V3's size: 61 layers, 43 groups of 6 experts in each routed one."""

    def __init__(self) -> None:
        self.layers = [type("Layer", (), {"groups": range(43)})] * 61

    def ring_sizes(self, ring: int) -> tuple[int, int]:
        return (61, 600 << 20) if ring == 0 else (58 * 43, 6 * 44_040_192)


def _plan(gib: float, tokens: int) -> MemoryPlan:
    spec = ModelSpec.from_config(make_config("deepseek-v3"), "config.json")
    layout: ModelLayout = _Sizes()  # type: ignore[assignment]
    plan = plan_memory(spec, layout, int(gib * GIB), tokens)
    assert plan.ring_bytes == plan.dense_slots * (600 << 20) + plan.expert_slots * 6 * 44_040_192
    assert plan.activation_bytes == fixed_bytes(spec) + plan.max_tokens * token_bytes(spec)
    assert plan.ring_bytes + plan.activation_bytes <= gib * GIB
    return plan


def test_memory_goes_to_prompts_and_rings_in_turn() -> None:
    least = _plan(7, 65536)
    assert least.dense_slots == 2
    assert 2 <= least.expert_slots < 21
    small, middle, large = _plan(12, 65536), _plan(16, 65536), _plan(32, 65536)
    assert small.expert_slots == middle.expert_slots == 21
    assert small.max_tokens < middle.max_tokens < large.max_tokens == 65536
    # A layer of slots at least, and some of what is left over.
    assert 43 < large.expert_slots < 3 * 43
    assert large.dense_slots == 2
    assert _plan(64, 65536).dense_slots == 61
    assert _plan(1000, 65536).expert_slots == 58 * 43


def test_copies_run_ahead_over_the_first_layers_which_have_no_experts() -> None:
    spec = ModelSpec.from_config(make_config("deepseek-v3"), "config.json")
    layout: Any = _Sizes()
    layout.layers = [type("Layer", (), {"groups": ()})] * 3 + layout.layers[3:]
    assert plan_memory(spec, layout, 40 * GIB, 8192).dense_slots == 3 + 2


def test_a_ring_never_holds_more_than_three_layers_unless_it_holds_all() -> None:
    assert _plan(300, 8192).expert_slots == 3 * 43


def test_ranks_divide_a_stripes_share_and_need_more_for_what_they_exchange() -> None:
    spec = ModelSpec.from_config(make_config("deepseek-v3"), "config.json")
    alone, two, four = (token_bytes(spec, ranks) for ranks in (1, 2, 4))
    assert two - four == pytest.approx(alone / 4, abs=2)
    assert two > alone


def test_a_gated_network_has_all_three_weights_in_fp16_at_once() -> None:
    def fixed(width: int) -> int:
        config = {**make_config("deepseek-v3"), "intermediate_size": width}
        return fixed_bytes(ModelSpec.from_config(config, "config.json"))

    # So wide that its layers need the most; a slice of tokens passes through it besides.
    per_column = (fixed(1 << 17) - fixed(1 << 16)) / (1 << 16)
    assert per_column == 3 * 2 * 7168 + 3 * 6 * SLICE_TOKENS


def test_slots_are_large_enough_for_every_layout_that_uses_them() -> None:
    spec = ModelSpec.from_config(make_config("deepseek-v3"), "config.json")
    small, large = _Sizes(), _Sizes()
    small.ring_sizes = lambda ring: (9, 1 << 20)  # type: ignore[method-assign]
    plan = plan_memory(spec, small, 20 * GIB, 128, others=[large])  # type: ignore[arg-type,list-item]
    assert plan.ring_bytes == plan.dense_slots * (600 << 20) + plan.expert_slots * 6 * 44_040_192


def test_the_first_rank_has_room_for_the_same_sweep_alone() -> None:
    spec = ModelSpec.from_config(make_config("qwen3-235b"), "config.json")
    assert token_bytes(spec, 8) < token_bytes(spec), "eight ranks together need less of each"
    sizes: Any = _Sizes()
    other, first = (
        plan_memory(spec, sizes, 16 * GIB, 1 << 20, world_size=8, others=others)
        for others in ((), (sizes,))
    )
    assert first.max_tokens < other.max_tokens
    assert first.activation_bytes == fixed_bytes(spec) + first.max_tokens * token_bytes(spec)


def test_too_little_memory_is_a_sentence() -> None:
    with pytest.raises(
        ResourceError, match=r"gpu: prefill needs at least 6\.\d GiB of device memory, 4\.0 GiB"
    ):
        _plan(4, 65536)


def test_tensors_without_gaps_are_one_range_per_layer() -> None:
    spec, weights = _tiny()
    order = [t.name for t in spec.tensors()]
    memory = torch.zeros(sum(weights[n].nbytes for n in order) + 4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    for name in order:
        source = weights[name]
        flat = memory[start : start + source.nbytes].view(torch.bfloat16)
        weights[name] = flat.view(source.shape).copy_(source)
        start += source.nbytes
    layout = lay_out(spec, weights)
    assert len(layout.ranges) == spec.num_layers
    assert [item.range_index for item in layout.items] == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("in_huge_pages", [True, False])
def test_repeated_layers_of_a_benchmark_share_ranges_but_not_gates(in_huge_pages: bool) -> None:
    """Four layers with experts, two of which differ, and a dense one: three ranges apart."""
    config = make_config("tiny", "deepseek_v3", layers=5) | {"quantization_config": FP8}
    spec = ModelSpec.from_config(config, "config.json")
    weights = RandomModel(spec, 2, in_huge_pages=in_huge_pages)
    routed = [i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeFfnSpec)]
    gates = [weights.tensor(f"layers.{i}.gate") for i in routed]
    assert len({gate.data_ptr() for gate in gates}) == len(routed) > 2
    assert not torch.equal(gates[0], gates[2])
    experts = [weights.tensor(f"layers.{i}.experts.down").data_ptr() for i in routed]
    assert experts[0] == experts[2] != experts[1]
    ranges = sorted(lay_out(spec, weights).ranges, key=lambda r: r.address)
    assert len(ranges) == 2 + min(2, spec.num_layers - len(routed))
    for before, after in itertools.pairwise(ranges):
        assert before.address + before.num_bytes <= after.address
