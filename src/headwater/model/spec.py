"""ModelSpec: everything the engines, the router and the memory plan need to know of a model.

Made from config.json alone; importable without torch. Owns the list of known architectures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import CheckpointError
from headwater.model import deepseek_v3, mixtral, qwen3_moe
from headwater.model.checkpoint_names import layer_tensors, top_tensors
from headwater.model.config_fields import ConfigFields
from headwater.model.family import Dimensions, Family
from headwater.model.layer_spec import (
    DenseFfnSpec,
    GqaSpec,
    KvShape,
    LayerSpec,
    MlaSpec,
    MoeFfnSpec,
    QuantSpec,
    RopeSpec,
)
from headwater.model.quant_config import read_quant
from headwater.weights.tensors import TensorSpec

__all__ = [
    "FAMILIES",
    "DenseFfnSpec",
    "GqaSpec",
    "KvShape",
    "LayerSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeFfnSpec",
    "QuantSpec",
    "RopeSpec",
]

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (deepseek_v3, mixtral, qwen3_moe)
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model.

    `max_context_tokens` bounds prompt plus answer. `eos_token_ids` end an answer; there may be
    none. `bos_token_id` is None for models without one.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    norm_eps: float
    is_embedding_tied: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quant: QuantSpec
    layers: tuple[LayerSpec, ...]

    @classmethod
    def load(cls, folder: Path) -> ModelSpec:
        """Reads the config.json of a checkpoint folder. Raises CheckpointError."""
        path = folder / "config.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str) -> ModelSpec:
        """Reads the text of a config.json; `source` names the file. Raises CheckpointError."""
        try:
            config = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{source}: is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{source}: expected a JSON object, got {config!r:.80}")
        return cls.from_config(config, source)

    @classmethod
    def from_config(cls, config: dict[str, object], source: str) -> ModelSpec:
        """Reads a parsed config.json; `source` names the file in messages.

        Raises CheckpointError, naming file, field and value, for an unknown architecture and for
        every field that is missing, of the wrong type, out of range or not supported.
        """
        fields = ConfigFields(config, source)
        family = _find_family(fields)
        dims = Dimensions(
            hidden_size=fields.integer("hidden_size", 1, 1 << 20),
            num_layers=fields.integer("num_hidden_layers", 1, 4096),
            max_context_tokens=fields.integer("max_position_embeddings"),
        )
        vocab_size = fields.integer("vocab_size")
        bos = fields.integers("bos_token_id", 0, vocab_size - 1)
        return cls(
            architecture=family.architecture,
            hidden_size=dims.hidden_size,
            vocab_size=vocab_size,
            max_context_tokens=dims.max_context_tokens,
            norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
            is_embedding_tied=fields.boolean("tie_word_embeddings", default=False),
            eos_token_ids=fields.integers("eos_token_id", 0, vocab_size - 1),
            bos_token_id=bos[0] if bos else None,
            quant=read_quant(fields),
            layers=family.read_layers(fields, dims),
        )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def kv(self) -> KvShape:
        """What each layer keeps per token; all layers of the known families keep the same."""
        return self.layers[0].kv

    def tensors(self, shards: int = 1) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, in the order of use: embedding, layers, head.

        With more than one shard, routed experts are cut along their intermediate dimension, one
        part for each NUMA node: gate_up becomes [experts, shards, 2, size / shards, hidden], down
        [experts, shards, hidden, size / shards]; scales and zero points likewise.

        Raises CheckpointError when the quantisation splits the experts of a layer, and when a
        weight's shape does not fit its format or the shards.
        """
        embed, *head = top_tensors(
            self.hidden_size, self.vocab_size, is_embedding_tied=self.is_embedding_tied
        )
        names = FAMILIES[self.architecture].names
        layers = [
            tensor
            for index, layer in enumerate(self.layers)
            for tensor in layer_tensors(index, layer, self.hidden_size, names, self.quant, shards)
        ]
        return (embed, *layers, *head)


def _find_family(fields: ConfigFields) -> Family:
    architectures = fields.strings("architectures")
    if not architectures:
        fields.fail("architectures", f"is missing; known are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES.get(architectures[0])
    if family is None:
        fields.fail(
            "architectures",
            f"names {architectures[0]!r}, which is not supported; known are"
            f" {', '.join(sorted(FAMILIES))}",
        )
    return family
