"""Reads the `quantization_config` of a config.json: absent, or FP8 in blocks of 128 x 128."""

from __future__ import annotations

from headwater.model.config_fields import ConfigFields
from headwater.model.layer_spec import FP8_BLOCK, QuantSpec


def read_quant(fields: ConfigFields) -> QuantSpec:
    """The QuantSpec; raises CheckpointError for any scheme but E4M3 with 128 x 128 blocks."""
    section = fields.section("quantization_config")
    if section is None:
        return QuantSpec()
    method = section.string("quant_method")
    if method != "fp8":
        section.fail("quant_method", f"is {method!r}, and only 'fp8' is supported")
    section.require("fmt", "e4m3")
    section.require("activation_scheme", "dynamic")
    blocks = section.integers("weight_block_size", 1, 1 << 20)
    if blocks != (FP8_BLOCK, FP8_BLOCK):
        section.fail(
            "weight_block_size",
            f"is {list(blocks)}, and only [{FP8_BLOCK}, {FP8_BLOCK}] is supported",
        )
    return QuantSpec("fp8", section.strings("modules_to_not_convert"))
