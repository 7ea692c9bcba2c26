"""Maps a model's canonical tensors to the tensors of its checkpoint.

Owns names, shapes and dtypes on both sides; reads no file. The families differ in little more
than the spelling of their experts, which CheckpointNames holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.errors import CheckpointError
from headwater.model.layer_spec import (
    FP8_BLOCK,
    DenseFfnSpec,
    GqaSpec,
    LayerSpec,
    MlaSpec,
    MoeFfnSpec,
    QuantSpec,
)
from headwater.weights.tensors import DType, TensorPart, TensorSpec

# Tensors that are small and never quantised may also be published in FP32.
_SMALL = (DType.BF16, DType.F32)
_SCALE = (DType.F32,)


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """How a family spells the modules of a routed layer, below model.layers.N."""

    moe_block: str = "mlp"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"


def layer_tensors(
    index: int, layer: LayerSpec, hidden_size: int, names: CheckpointNames, quant: QuantSpec
) -> Iterator[TensorSpec]:
    """The tensors of layer `index`; raises CheckpointError when its experts are half converted."""
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    yield _small(f"{ours}.attention_norm", f"{theirs}.input_layernorm.weight", hidden_size)
    attention = _Linears(f"{ours}.attention", f"{theirs}.self_attn", quant)
    if isinstance(layer.attention, GqaSpec):
        yield from _gqa_tensors(layer.attention, hidden_size, attention)
    else:
        yield from _mla_tensors(layer.attention, hidden_size, attention)
    yield _small(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm.weight", hidden_size)
    if isinstance(layer.ffn, DenseFfnSpec):
        ffn = _Linears(f"{ours}.ffn", f"{theirs}.mlp", quant)
        yield from _dense_tensors(layer.ffn.intermediate_size, hidden_size, ffn)
    else:
        yield from _moe_tensors(layer.ffn, hidden_size, ours, theirs, names, quant)


def top_tensors(
    hidden_size: int, vocab_size: int, *, is_embedding_tied: bool
) -> Iterator[TensorSpec]:
    """The tensors outside the layers."""
    table = (vocab_size, hidden_size)
    yield TensorSpec("embed", table, (DType.BF16,), (TensorPart("model.embed_tokens.weight"),))
    yield _small("final_norm", "model.norm.weight", hidden_size)
    if not is_embedding_tied:
        yield TensorSpec("lm_head", table, (DType.BF16,), (TensorPart("lm_head.weight"),))


@dataclass(frozen=True, slots=True)
class _Linears:
    """Linear modules below one canonical and one checkpoint prefix."""

    ours: str
    theirs: str
    quant: QuantSpec

    def linear(self, name: str, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """The weight `name` [rows, columns] and, in FP8, its scale."""
        return self.stack(name, {(): module}, (), rows, columns)

    def stack(
        self,
        name: str,
        modules: dict[tuple[int, ...], str],
        leading: tuple[int, ...],
        rows: int,
        columns: int,
    ) -> Iterator[TensorSpec]:
        """The weights of `modules`, by index, stacked into [*leading, rows, columns]."""
        paths = {index: f"{self.theirs}.{module}" for index, module in modules.items()}
        are_fp8 = {path: self.quant.is_fp8(path) for path in paths.values()}
        if len(set(are_fp8.values())) > 1:
            kept = next(path for path, is_fp8 in are_fp8.items() if not is_fp8)
            raise CheckpointError(
                f"config.json: quantization_config.modules_to_not_convert keeps {kept} but not all"
                f" of the experts beside it; a layer's experts must have one format"
            )
        is_fp8 = all(are_fp8.values())
        yield TensorSpec(
            f"{self.ours}.{name}",
            (*leading, rows, columns),
            (DType.F8_E4M3,) if is_fp8 else (DType.BF16,),
            tuple(TensorPart(f"{path}.weight", index) for index, path in paths.items()),
        )
        if is_fp8:
            yield TensorSpec(
                f"{self.ours}.{name}.scale",
                (*leading, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)),
                _SCALE,
                tuple(
                    TensorPart(f"{path}.weight_scale_inv", index) for index, path in paths.items()
                ),
            )


def _small(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, _SMALL, (TensorPart(source),))


def _gqa_tensors(spec: GqaSpec, hidden_size: int, at: _Linears) -> Iterator[TensorSpec]:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from at.linear("q", "q_proj", q_rows, hidden_size)
    yield from at.linear("k", "k_proj", kv_rows, hidden_size)
    yield from at.linear("v", "v_proj", kv_rows, hidden_size)
    yield from at.linear("o", "o_proj", hidden_size, q_rows)
    if spec.has_qk_norm:
        yield _small(f"{at.ours}.q_norm", f"{at.theirs}.q_norm.weight", spec.head_dim)
        yield _small(f"{at.ours}.k_norm", f"{at.theirs}.k_norm.weight", spec.head_dim)


def _mla_tensors(spec: MlaSpec, hidden_size: int, at: _Linears) -> Iterator[TensorSpec]:
    q_rows = spec.num_heads * (spec.nope_dim + spec.rope_dim)
    rank, kv_rank = spec.q_lora_rank, spec.kv_lora_rank
    if rank is None:
        yield from at.linear("q", "q_proj", q_rows, hidden_size)
    else:
        yield from at.linear("q_a", "q_a_proj", rank, hidden_size)
        yield _small(f"{at.ours}.q_a_norm", f"{at.theirs}.q_a_layernorm.weight", rank)
        yield from at.linear("q_b", "q_b_proj", q_rows, rank)
    yield from at.linear("kv_a", "kv_a_proj_with_mqa", kv_rank + spec.rope_dim, hidden_size)
    yield _small(f"{at.ours}.kv_a_norm", f"{at.theirs}.kv_a_layernorm.weight", kv_rank)
    yield from at.linear(
        "kv_b", "kv_b_proj", spec.num_heads * (spec.nope_dim + spec.v_dim), kv_rank
    )
    yield from at.linear("o", "o_proj", hidden_size, spec.num_heads * spec.v_dim)


def _dense_tensors(intermediate_size: int, hidden_size: int, at: _Linears) -> Iterator[TensorSpec]:
    yield from at.linear("gate", "gate_proj", intermediate_size, hidden_size)
    yield from at.linear("up", "up_proj", intermediate_size, hidden_size)
    yield from at.linear("down", "down_proj", hidden_size, intermediate_size)


def _moe_tensors(
    spec: MoeFfnSpec,
    hidden_size: int,
    ours: str,
    theirs: str,
    names: CheckpointNames,
    quant: QuantSpec,
) -> Iterator[TensorSpec]:
    block = f"{theirs}.{names.moe_block}"
    yield _small(f"{ours}.gate", f"{block}.gate.weight", spec.num_experts, hidden_size)
    if spec.gate == "sigmoid_bias_group":
        source = f"{block}.gate.e_score_correction_bias"
        yield _small(f"{ours}.gate.bias", source, spec.num_experts)
    experts = _Linears(f"{ours}.experts", f"{block}.experts", quant)
    count, size = spec.num_experts, spec.intermediate_size
    gate_up: dict[tuple[int, ...], str] = {
        (e, i): f"{e}.{module}"
        for e in range(count)
        for i, module in enumerate((names.expert_gate, names.expert_up))
    }
    yield from experts.stack("gate_up", gate_up, (count, 2), size, hidden_size)
    down: dict[tuple[int, ...], str] = {(e,): f"{e}.{names.expert_down}" for e in range(count)}
    yield from experts.stack("down", down, (count,), hidden_size, size)
    if spec.shared_intermediate_size:
        shared = _Linears(f"{ours}.shared", f"{block}.shared_experts", quant)
        yield from _dense_tensors(spec.shared_intermediate_size, hidden_size, shared)
