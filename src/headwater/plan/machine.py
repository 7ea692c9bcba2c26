"""A machine as a plan sees it: what memory, links and processors give. Read from TOML, or measured.

Owns the file's form. All rates are what programs get, not what data sheets say: GB are 10^9 bytes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: copies from the host, reads of its memory, and products of large matrices.

    `fp8_tflop_per_s` is 0 where it cannot multiply E4M3. `peer_gb_per_s` is what two GPUs exchange.
    """

    name: str
    vram_gib: float
    link_gb_per_s: float
    memory_gb_per_s: float
    bf16_tflop_per_s: float
    fp8_tflop_per_s: float = 0.0
    peer_gb_per_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Machine:
    """`dram_gb_per_s` is read by all cores of each NUMA node from its own memory.

    `cpu_tflop_per_s` is what the CPU kernels reach with prompts, not with one large product.
    """

    name: str
    cores: int
    dram_gib: float
    dram_gb_per_s: tuple[float, ...]
    cpu_tflop_per_s: float
    gpus: tuple[Gpu, ...] = ()

    @property
    def read_gb_per_s(self) -> float:
        """All nodes together."""
        return sum(self.dram_gb_per_s)


def read_machine(path: Path) -> Machine:
    """Raises ConfigError that names file, field and value."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    gpus = table.pop("gpus", [])
    if not isinstance(gpus, list):
        raise ConfigError(f"{path}: gpus: must be tables [[gpus]], got {gpus!r}")
    values = _checked(Machine, table, str(path), leave_out=("gpus",))
    found = [_checked(Gpu, gpu, f"{path}: gpus[{i}]") for i, gpu in enumerate(gpus)]
    return Machine(**values, gpus=tuple(Gpu(**gpu) for gpu in found))


def _checked(
    kind: type[Machine] | type[Gpu], table: Any, source: str, leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The table's values if it has the fields of `kind`, numbers all above zero."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: must be a table, got {table!r}")
    known = {field.name: field for field in fields(kind) if field.name not in leave_out}
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(
            f"{source}: {unknown[0]}: is not known; the fields are {', '.join(known)}"
        )
    values: dict[str, Any] = {}
    for name, field in known.items():
        is_optional = isinstance(field.default, float)
        if name not in table:
            if is_optional:
                continue
            raise ConfigError(f"{source}: {name}: is missing")
        value = table[name]
        if name == "name":
            if not isinstance(value, str):
                raise ConfigError(f"{source}: name: must be a text, got {value!r}")
        elif name == "dram_gb_per_s":
            value = tuple(value) if isinstance(value, list) else (value,)
            if not value or not all(_is_positive(v) for v in value):
                raise ConfigError(f"{source}: {name}: must be numbers above 0, got {table[name]!r}")
        elif not _is_positive(value) and not (is_optional and value == 0):
            raise ConfigError(f"{source}: {name}: must be a number above 0, got {value!r}")
        values[name] = value
    return values


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
