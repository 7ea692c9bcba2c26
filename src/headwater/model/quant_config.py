"""Reads the `quantization_config` of a config.json, in the forms that its publishers write.

Absent: BF16. fp8: E4M3 in blocks of 128 x 128. compressed-tensors: pack-quantized INT4. awq, gptq:
INT4 in their own orders. mxfp4: as `headwater convert` writes it, {"quant_method": "mxfp4",
"group_size": 32, "modules_to_not_convert": [...]}.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headwater.model.config_fields import ConfigFields
from headwater.model.layer_spec import FP8_BLOCK, INT4_GROUPS, MXFP4_GROUP, QuantSpec


def read_quant(fields: ConfigFields) -> QuantSpec:
    """The QuantSpec; raises CheckpointError for a scheme that is not supported."""
    section = fields.section("quantization_config") or fields.section("compression_config")
    if section is None:
        return QuantSpec()
    method = section.string("quant_method")
    reader = _READERS.get(method)
    if reader is None:
        section.fail("quant_method", f"is {method!r}, must be one of {', '.join(_READERS)}")
    return reader(section)


def _read_fp8(section: ConfigFields) -> QuantSpec:
    section.require("fmt", "e4m3")
    section.require("activation_scheme", "dynamic")
    blocks = section.integers("weight_block_size", 1, 1 << 20)
    if blocks != (FP8_BLOCK, FP8_BLOCK):
        section.fail(
            "weight_block_size",
            f"is {list(blocks)}, and only [{FP8_BLOCK}, {FP8_BLOCK}] is supported",
        )
    return QuantSpec("fp8", _names(section, "modules_to_not_convert"))


def _read_mxfp4(section: ConfigFields) -> QuantSpec:
    section.require("group_size", MXFP4_GROUP)
    unconverted = _names(section, "modules_to_not_convert")
    return QuantSpec("mxfp4", unconverted, group=MXFP4_GROUP)


def _read_compressed_tensors(section: ConfigFields) -> QuantSpec:
    section.require("format", "pack-quantized")
    section.require("kv_cache_scheme", None)
    groups = section.section("config_groups")
    if groups is None:
        section.fail("config_groups", "is missing")
    names = groups.names()
    if len(names) != 1:
        section.fail("config_groups", f"has {len(names)} groups, and only one is supported")
    scheme = groups.section(names[0])
    weights = None if scheme is None else scheme.section("weights")
    if scheme is None or weights is None:
        groups.fail(f"{names[0]}.weights", "is missing")
    scheme.require("input_activations", None)
    scheme.require("output_activations", None)
    weights.require("num_bits", 4)
    weights.require("type", "int")
    weights.require("strategy", "group")
    weights.require("dynamic", False)
    # Columns sorted by activation, unless they were put back ("static", "weight").
    order = weights.string("actorder", default="static")
    if order not in ("static", "weight"):
        weights.fail("actorder", f"is {order!r}: groups of columns must lie in their order")
    targets = _names(scheme, "targets")
    return QuantSpec(
        "int4",
        _names(section, "ignore"),
        () if "Linear" in targets else targets,
        group=_read_group(weights),
        has_zeros=not weights.boolean("symmetric", default=True),
    )


def _read_awq(section: ConfigFields) -> QuantSpec:
    section.require("version", "gemm")
    section.require("bits", 4)
    return QuantSpec(
        "int4",
        _names(section, "modules_to_not_convert"),
        group=_read_group(section),
        has_zeros=section.boolean("zero_point", default=True),
        packing="awq",
    )


def _read_gptq(section: ConfigFields) -> QuantSpec:
    section.require("bits", 4)
    section.require("lm_head", False)
    if section.boolean("desc_act", default=False):
        section.fail(
            "desc_act", "is true, and only false is supported: columns must lie in their order"
        )
    form = section.string("checkpoint_format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        section.fail("checkpoint_format", f"is {form!r}, must be gptq or gptq_v2")
    overrides = section.section("dynamic")
    rules = () if overrides is None else overrides.names()
    for rule in rules:
        if not rule.startswith("-:"):
            section.fail("dynamic", f"changes {rule!r}, and only leaving modules out is supported")
    unconverted = (
        *_names(section, "modules_to_not_convert"),
        *(_checked_name(section, "dynamic", f"re:{rule[2:]}") for rule in rules),
    )
    return QuantSpec(
        "int4",
        unconverted,
        group=_read_group(section),
        has_zeros=not section.boolean("sym", default=True),
        packing="gptq" if form == "gptq" else "gptq_v2",
    )


_READERS: dict[str, Callable[[ConfigFields], QuantSpec]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}


def _read_group(section: ConfigFields) -> int:
    group = section.integer("group_size", -1)
    if group not in INT4_GROUPS:
        allowed = ", ".join(map(str, INT4_GROUPS))
        section.fail("group_size", f"is {group}, must be one of {allowed}")
    return group


def _names(section: ConfigFields, field: str) -> tuple[str, ...]:
    return tuple(_checked_name(section, field, name) for name in section.strings(field))


def _checked_name(section: ConfigFields, field: str, name: str) -> str:
    if name.startswith("re:"):
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            section.fail(field, f"holds {name!r}, which is no regular expression: {error}")
    return name
