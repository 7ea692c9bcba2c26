"""The quantization_config in its published forms: what is read, what is refused, and why."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.model.config_fields import ConfigFields
from headwater.model.layer_spec import QuantSpec
from headwater.model.quant_config import read_quant
from headwater.model.spec import ModelSpec
from headwater.synth.shapes import make_config
from headwater.weights.tensors import Encoding

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MXFP4 = {"quant_method": "mxfp4"}
WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}


def packed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {})}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
    } | changes


def read(quant: dict[str, Any]) -> QuantSpec:
    return read_quant(ConfigFields({"quantization_config": quant}, "config.json"))


def test_published_forms() -> None:
    assert read(AWQ) == QuantSpec("int4", group=128, has_zeros=True, packing="awq")
    assert read(GPTQ) == QuantSpec("int4", group=128, packing="gptq")
    second = read(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"})
    assert (second.has_zeros, second.packing) == (True, "gptq_v2")
    assert read(packed()) == QuantSpec("int4", group=32)
    assert read(packed({"symmetric": False})).has_zeros
    assert read(MXFP4) == QuantSpec("mxfp4", group=32)


def test_modules_left_out() -> None:
    ignore = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    quant = read(packed(ignore=ignore))
    assert quant.format_of("model.layers.3.mlp.experts.7.up_proj") == "int4"
    assert quant.format_of("model.layers.3.self_attn.o_proj") == "bf16"
    assert quant.format_of("model.layers.0.mlp.up_proj") == "bf16"
    rules = read(GPTQ | {"dynamic": {"-:.*shared_experts": {}}})
    assert rules.format_of("model.layers.3.mlp.shared_experts.up_proj") == "bf16"
    assert rules.format_of("model.layers.3.mlp.experts.1.up_proj") == "int4"
    gates = read(AWQ | {"modules_to_not_convert": ["mlp.gate"]})
    assert gates.format_of("model.layers.0.mlp.gate_proj") == "int4"
    targets = packed()
    targets["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    assert read(targets).format_of("model.layers.0.self_attn.q_proj") == "bf16"
    assert read(targets).format_of("model.layers.0.mlp.experts.0.up_proj") == "int4"


BAD = [
    (GPTQ | {"desc_act": True}, r"desc_act is true, and only false .* columns must lie in their"),
    (GPTQ | {"bits": 8}, "bits is 8, and only 4"),
    (GPTQ | {"group_size": -1}, "group_size is -1, must be one of 32, 64, 128"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', must be gptq or"),
    (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "dynamic changes '[+]:.*up_proj'"),
    (GPTQ | {"dynamic": {"-:(": {}}}, "which is no regular expression"),
    (AWQ | {"version": "gemv"}, "version is 'gemv', and only 'gemm'"),
    (MXFP4 | {"group_size": 16}, "group_size is 16, and only 32"),
    (packed({"actorder": "group"}), "weights.actorder is 'group': groups of columns must lie"),
    (packed({"num_bits": 8}), "weights.num_bits is 8, and only 4"),
    (packed({"strategy": "channel"}), "weights.strategy is 'channel'"),
    (packed(format="float-quantized"), "format is 'float-quantized', and only 'pack-quantized'"),
    (packed(config_groups={}), "config_groups has 0 groups, and only one"),
    (packed(config_groups={"g": {}}), "config_groups.g.weights is missing"),
    (packed(ignore=["re:*"]), "ignore holds 're:[*]', which is no regular expression"),
]


@pytest.mark.parametrize(("quant", "message"), BAD)
def test_unsupported_forms_are_named(quant: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config.json: quantization_config\..*" + message):
        read(quant)


def test_shapes_that_do_not_fit() -> None:
    def tensors(quant: dict[str, Any], size: int, shards: int = 1) -> None:
        changes = {"intermediate_size": size, "quantization_config": quant}
        config = make_config("tiny", "mixtral") | changes
        ModelSpec.from_config(config, "config.json").tensors(shards)

    tensors(AWQ, 256)
    with pytest.raises(CheckpointError, match=r"group_size is 128, .* divide the 320 columns"):
        tensors(AWQ, 320)
    with pytest.raises(CheckpointError, match=r"has 36 rows, but its int4 codes come in words of"):
        tensors(AWQ, 36)
    tensors(packed(), 128, 4)
    with pytest.raises(CheckpointError, match=r"model.shards: .* 128 columns, which 8 shards in"):
        tensors(packed(), 128, 8)


def test_names_of_fields() -> None:
    config = make_config("tiny", "mixtral") | {"quantization_config": AWQ}
    tensors = {t.name: t for t in ModelSpec.from_config(config, "config.json").tensors()}
    experts = tensors["layers.0.experts.gate_up"]
    assert experts.shape == (8, 2, 256, 128)
    assert experts.encodings == (Encoding.AWQ_CODES,)
    assert experts.parts[1].source.endswith("experts.0.w3.qweight")
    assert tensors["layers.0.experts.gate_up.scale"].shape == (8, 2, 256, 2)
    assert tensors["layers.0.experts.down.zero"].shape == (8, 256, 2)
