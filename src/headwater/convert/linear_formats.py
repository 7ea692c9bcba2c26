"""Linear weights written in each format: names, shapes and order of their tensors in the file.

Owns the writing side of headwater.model.stored_fields, the quantization_config that tells others
about it, and the measured error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwater.convert.four_bits import quantize_int4, quantize_mxfp4
from headwater.convert.fp8 import BLOCK, quantize_blocks
from headwater.convert.safetensors_writer import OutTensor
from headwater.errors import ConfigError
from headwater.model.layer_spec import INT4_GROUPS, MXFP4_GROUP, LinearFormat

RowRuns = Callable[[], Iterator[Tensor]]
"""Makes a weight's FP32 rows in runs [n, K]; all runs but the last are multiples of 128 rows."""


@dataclass(slots=True)
class Error:
    """Squared differences and squares, summed up over all weights of a class."""

    difference: float = 0.0
    total: float = 0.0

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Counts `values`, which stand for `rows`."""
        self.difference += float((values - rows).square_().sum(dtype=torch.float64))
        self.total += float(rows.square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        """The relative L2 error."""
        return math.sqrt(self.difference / self.total) if self.total else 0.0


@dataclass(frozen=True, slots=True)
class LinearTarget:
    """A format to write; `group` counts the columns per INT4 scale."""

    format: LinearFormat
    group: int = 128

    def tensors(
        self, module: str, shape: tuple[int, int], rows: RowRuns, error: Error
    ) -> list[OutTensor]:
        """What `module` consists of in the file; making it adds to `error`.

        Raises ConfigError when groups do not divide the columns.
        """
        if self.format == "bf16":
            return [OutTensor(f"{module}.weight", "BF16", shape, lambda: _to_bf16(rows, error))]
        num_rows, columns = shape
        if self.format == "fp8":
            blocks = (-(-num_rows // BLOCK), -(-columns // BLOCK))
            writing = _Writing(rows, error, _fp8_run)
            return [
                OutTensor(f"{module}.weight", "F8_E4M3", shape, writing.values),
                OutTensor(f"{module}.weight_scale_inv", "F32", blocks, writing.scales),
            ]
        group = self.group if self.format == "int4" else MXFP4_GROUP
        _check_group(module, columns, group)
        packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
        scale_shape = (num_rows, columns // group)
        if self.format == "mxfp4":
            writing = _Writing(rows, error, quantize_mxfp4)
            return [
                OutTensor(packed, "U8", (num_rows, columns // 2), writing.values),
                OutTensor(scale, "U8", scale_shape, writing.scales),
            ]
        writing = _Writing(rows, error, lambda run: quantize_int4(run, group))
        return [
            OutTensor(packed, "I32", (num_rows, columns // 8), writing.values),
            OutTensor(scale, "BF16", scale_shape, writing.scales),
            OutTensor(f"{module}.weight_shape", "I64", (2,), lambda: [torch.tensor(shape)]),
        ]

    def config(self, unconverted_modules: Sequence[str]) -> dict[str, object] | None:
        """The quantization_config of the checkpoint; None for BF16."""
        kept = list(unconverted_modules)
        if self.format == "bf16":
            return None
        if self.format == "fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK],
                "activation_scheme": "dynamic",
                "modules_to_not_convert": kept,
            }
        if self.format == "mxfp4":
            return {
                "quant_method": "mxfp4",
                "group_size": MXFP4_GROUP,
                "modules_to_not_convert": kept,
            }
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.group,
            "dynamic": False,
            "actorder": None,
            "observer": "minmax",
        }
        scheme = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": kept,
            "kv_cache_scheme": None,
        }


@dataclass(slots=True)
class _Writing:
    """Quantises runs of rows, keeping their scales until it is their turn in the file."""

    rows: RowRuns
    error: Error
    quantize: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    _scales: list[Tensor] = field(default_factory=list)

    def values(self) -> Iterator[Tensor]:
        self._scales.clear()
        for run in self.rows():
            codes, scales, values = self.quantize(run)
            self.error.add(run, values)
            self._scales.append(scales)
            yield codes

    def scales(self) -> list[Tensor]:
        scales, self._scales = self._scales, []
        return scales


def _to_bf16(rows: RowRuns, error: Error) -> Iterator[Tensor]:
    for run in rows():
        values = run.bfloat16()
        error.add(run, values.float())
        yield values


def _fp8_run(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales = quantize_blocks(rows)
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes, scales, codes.float() * spread[: rows.shape[0], : rows.shape[1]]


def _check_group(module: str, columns: int, group: int) -> None:
    if columns % group == 0:
        return
    fitting = [str(size) for size in INT4_GROUPS if columns % size == 0 and size < group]
    remedy = f"--group {fitting[-1]} would" if fitting else "choose another format"
    raise ConfigError(f"{module}: groups of {group} do not divide its {columns} columns; {remedy}")
