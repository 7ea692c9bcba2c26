"""Reads the rotary embedding of a config.json, in its older and its newer form.

Older: `rope_theta` and an optional `rope_scaling` object; newer (transformers 5): one
`rope_parameters` object that holds both.
"""

from __future__ import annotations

import math

from headwater.model.config_fields import ConfigFields
from headwater.model.layer_spec import RopeSpec

_KINDS = ("default", "linear", "yarn")
_MAX_THETA = 1e12
_MAX_FACTOR = 1e6


def read_rope(
    fields: ConfigFields, dim: int, max_context_tokens: int, *, is_interleaved: bool = False
) -> RopeSpec:
    """The RopeSpec over `dim` elements.

    Raises CheckpointError for unknown kinds and for fields missing or out of range.
    """
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta_fields = scaling if scaling is not None and scaling.has("rope_theta") else fields
    theta = theta_fields.number("rope_theta", 1.0, _MAX_THETA)
    for place in (fields, scaling):
        if place is not None:
            place.require("partial_rotary_factor", 1.0)
    if scaling is None:
        return RopeSpec("default", dim, theta, is_interleaved)
    # `type` is the older spelling; where both are there, `rope_type` is the maintained one.
    kind_field = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.string(kind_field, default="default")
    if kind not in _KINDS:
        scaling.fail(kind_field, f"is {kind!r}, must be one of {', '.join(_KINDS)}")
    if kind == "default":
        return RopeSpec("default", dim, theta, is_interleaved)
    if kind == "linear":
        factor = scaling.number("factor", 1.0, _MAX_FACTOR)
        return RopeSpec("linear", dim, theta, is_interleaved, factor=factor)
    original = scaling.integer(
        "original_max_position_embeddings",
        high=max_context_tokens,
        high_name="max_position_embeddings",
    )
    factor = scaling.number("factor", 1.0, _MAX_FACTOR, default=max_context_tokens / original)
    beta_fast = scaling.number("beta_fast", 1e-3, 1e6, default=32.0)
    beta_slow = scaling.number("beta_slow", 1e-3, beta_fast, default=1.0)
    return RopeSpec(
        "yarn",
        dim,
        theta,
        is_interleaved,
        factor=factor,
        original_context_tokens=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        is_range_truncated=scaling.boolean("truncate", default=True),
        amplitude=_amplitude(scaling, factor),
    )


def read_softmax_mscale(fields: ConfigFields, rope: RopeSpec) -> float:
    """The factor by which YaRN's `mscale_all_dim` changes DeepSeek's softmax scale."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    if rope.kind != "yarn" or scaling is None:
        return 1.0
    return _mscale(rope.factor, scaling.number("mscale_all_dim", 0.0, 100.0, default=0.0)) ** 2


def _amplitude(scaling: ConfigFields, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", 0.0, 100.0)
    mscale = scaling.number("mscale", 0.0, 100.0, default=0.0)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, 100.0, default=0.0)
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
