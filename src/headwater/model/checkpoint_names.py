"""Maps a model's canonical tensors to the tensors of its checkpoint.

Owns names and shapes on both sides; reads no file. What a linear weight consists of in each format
is in stored_fields.py. The families differ in little more than the spelling of their experts, which
CheckpointNames holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headwater.errors import CheckpointError
from headwater.model.layer_spec import (
    DenseFfnSpec,
    GqaSpec,
    LayerSpec,
    LinearFormat,
    MlaSpec,
    MoeFfnSpec,
    QuantSpec,
)
from headwater.model.stored_fields import StoredField, row_multiple, stored_fields
from headwater.weights.tensors import Cut, DType, Encoding, TensorPart, TensorSpec

# Tensors that are small and never quantised may also be published in FP32.
_SMALL = (DType.BF16, DType.F32)

Axis = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """How a family spells the modules of a routed layer, below model.layers.N."""

    moe_block: str = "mlp"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"


def layer_tensors(
    index: int,
    layer: LayerSpec,
    hidden_size: int,
    names: CheckpointNames,
    quant: QuantSpec,
    shards: int = 1,
) -> Iterator[TensorSpec]:
    """The tensors of layer `index`, its experts cut into `shards`.

    Raises CheckpointError when its experts are half converted, or a weight's shape does not fit
    its format or the number of shards.
    """
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
        yield from _moe_tensors(layer.ffn, hidden_size, ours, theirs, names, quant, shards)


def top_tensors(
    hidden_size: int, vocab_size: int, *, is_embedding_tied: bool
) -> Iterator[TensorSpec]:
    """The tensors outside the layers."""
    table = (vocab_size, hidden_size)
    yield _table("embed", "model.embed_tokens.weight", table)
    yield _small("final_norm", "model.norm.weight", hidden_size)
    if not is_embedding_tied:
        yield _table("lm_head", "lm_head.weight", table)


@dataclass(frozen=True, slots=True)
class _Linears:
    """Linear modules below one canonical and one checkpoint prefix."""

    ours: str
    theirs: str
    quant: QuantSpec

    def linear(self, name: str, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
        """The weight `name` [rows, columns] and what its format needs beside it."""
        return self.stack(name, {(): module}, (), (rows, columns))

    def stack(
        self,
        name: str,
        modules: dict[tuple[int, ...], str],
        leading: tuple[int, ...],
        shape: tuple[int, int],
        shards: int = 1,
        split: Axis = "rows",
    ) -> Iterator[TensorSpec]:
        """The weights of `modules`, by index, stacked into [*leading, *shape].

        With more than one shard each weight is cut along `split`, and the number of the shard
        becomes the second dimension: [leading[0], shards, *leading[1:], *smaller shape].
        """
        paths = {index: f"{self.theirs}.{module}" for index, module in modules.items()}
        linear_format = self._common_format(tuple(paths.values()))
        for field in stored_fields(self.quant, linear_format):
            some_path = next(iter(paths.values()))
            self._check_shape(field, linear_format, some_path, shape)
            whole = field.shape(*shape)
            if shards == 1:
                parts = {
                    index: TensorPart(path + field.theirs, index) for index, path in paths.items()
                }
                dims = (*leading, *whole)
            else:
                cut_shape = self._shard_shape(field, some_path, shape, shards, split)
                dims = (leading[0], shards, *leading[1:], *cut_shape)
                parts = {
                    (index[0], shard, *index[1:]): TensorPart(
                        path + field.theirs,
                        (index[0], shard, *index[1:]),
                        Cut(
                            whole,
                            shard * cut_shape[0] if split == "rows" else 0,
                            shard * cut_shape[1] if split == "columns" else 0,
                        ),
                    )
                    for index, path in paths.items()
                    for shard in range(shards)
                }
            yield TensorSpec(
                f"{self.ours}.{name}{field.ours}",
                dims,
                field.dtypes,
                tuple(parts.values()),
                field.encodings,
            )

    def _common_format(self, paths: tuple[str, ...]) -> LinearFormat:
        formats = {path: self.quant.format_of(path) for path in paths}
        if len(set(formats.values())) > 1:
            kept = next(path for path, kind in formats.items() if kind == "bf16")
            raise CheckpointError(
                f"config.json: quantization_config keeps {kept} in BF16 but not all of the experts"
                f" beside it; a layer's experts must have one format"
            )
        return formats[paths[0]]

    def _check_shape(
        self, field: StoredField, linear_format: LinearFormat, path: str, shape: tuple[int, int]
    ) -> None:
        """FP8 blocks may be ragged; groups, and words of several codes, may not."""
        if linear_format in ("bf16", "fp8"):
            return
        multiple = row_multiple(self.quant)
        for side, size, needed in (("rows", shape[0], multiple), ("columns", shape[1], 8)):
            if size % needed:
                raise CheckpointError(
                    f"config.json: {path} has {size} {side}, but its {linear_format} codes come in"
                    f" words of {needed}"
                )
        if shape[1] % field.columns:
            raise CheckpointError(
                f"config.json: quantization_config.group_size is {field.columns}, which does not"
                f" divide the {shape[1]} columns of {path}"
            )

    def _shard_shape(
        self,
        field: StoredField,
        path: str,
        shape: tuple[int, int],
        shards: int,
        split: Axis,
    ) -> tuple[int, int]:
        axis = 0 if split == "rows" else 1
        unit = field.rows if split == "rows" else field.columns
        if shape[axis] % (shards * unit):
            raise CheckpointError(
                f"model.shards: {path} has {shape[axis]} {split}, which {shards} shards in whole"
                f" blocks of {unit} do not divide; choose another number of shards"
            )
        size = shape[axis] // shards
        return field.shape(size, shape[1]) if axis == 0 else field.shape(shape[0], size)


def _small(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, _SMALL, (TensorPart(source),), (Encoding.F16_TO_F32,))


def _table(name: str, source: str, shape: tuple[int, int]) -> TensorSpec:
    parts = (TensorPart(source),)
    return TensorSpec(name, shape, (DType.BF16,), parts, (Encoding.F16_TO_BF16,))


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
    shards: int,
) -> Iterator[TensorSpec]:
    block = f"{theirs}.{names.moe_block}"
    yield _small(f"{ours}.gate", f"{block}.gate.weight", spec.num_experts, hidden_size)
    if spec.has_bias:
        source = f"{block}.gate.e_score_correction_bias"
        yield _small(f"{ours}.gate.bias", source, spec.num_experts)
    experts = _Linears(f"{ours}.experts", f"{block}.experts", quant)
    count, size = spec.num_experts, spec.intermediate_size
    gate_up: dict[tuple[int, ...], str] = {
        (e, i): f"{e}.{module}"
        for e in range(count)
        for i, module in enumerate((names.expert_gate, names.expert_up))
    }
    yield from experts.stack("gate_up", gate_up, (count, 2), (size, hidden_size), shards, "rows")
    down: dict[tuple[int, ...], str] = {(e,): f"{e}.{names.expert_down}" for e in range(count)}
    yield from experts.stack("down", down, (count,), (hidden_size, size), shards, "columns")
    if spec.shared_intermediate_size:
        shared = _Linears(f"{ours}.shared", f"{block}.shared_experts", quant)
        yield from _dense_tensors(spec.shared_intermediate_size, hidden_size, shared)
