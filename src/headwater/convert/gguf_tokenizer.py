"""Rebuilds a tokenizer from the metadata of a GGUF file.

Owns tokenizer.json (vocabulary, merges, how text is cut before merging) and tokenizer_config.json
(special tokens, chat template). Only byte-level BPE is known here.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headwater.convert.gguf_reader import GgufFile
from headwater.errors import CheckpointError

_TYPE_CONTROL = 3
_TYPE_USER_DEFINED = 4

_PRE_TOKENIZERS = {
    # Each digit on its own, then GPT-2's splitting into words.
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}


def write_tokenizer(source: GgufFile, out_dir: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `out_dir`.

    Raises CheckpointError when the GGUF holds another kind of tokenizer.
    """
    tokens = source.get_list("tokenizer.ggml.tokens", str)
    _build(source, tokens).save(str(out_dir / "tokenizer.json"))
    config = json.dumps(_config(source, tokens), indent=2, ensure_ascii=False) + "\n"
    (out_dir / "tokenizer_config.json").write_text(config, encoding="utf-8")


def _build(source: GgufFile, tokens: list[str]) -> Tokenizer:
    model = source.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise CheckpointError(
            f"{source.path}: field 'tokenizer.ggml.model': only gpt2 (byte-level BPE) is "
            f"supported, got {model!r}"
        )
    pre = source.get("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source.path}: field 'tokenizer.ggml.pre': expected one of "
            f"{', '.join(_PRE_TOKENIZERS)}, got {pre!r}"
        )
    types = source.get_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{source.path}: field 'tokenizer.ggml.tokens': {len(tokens)} tokens, of which "
            f"{len(set(tokens))} differ, with {len(types)} types; the three must be equal"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(source)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    _set_post_processor(source, tokenizer, tokens)
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_TYPE_CONTROL, _TYPE_USER_DEFINED):
            is_special = kind == _TYPE_CONTROL
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    return tokenizer


def _merges(source: GgufFile) -> list[tuple[str, str]]:
    merges = []
    for merge in source.get_list("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"{source.path}: field 'tokenizer.ggml.merges': expected two tokens and one "
                f"space, got {merge!r}"
            )
        merges.append((left, right))
    return merges


def _set_post_processor(source: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    if source.get("tokenizer.ggml.add_bos_token", bool, False):
        bos_id = source.get("tokenizer.ggml.bos_token_id", int)
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )


def _config(source: GgufFile, tokens: list[str]) -> dict[str, object]:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.get("llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": source.get("tokenizer.ggml.add_bos_token", bool, False),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = source.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    chat_template = source.get("tokenizer.chat_template", str, "")
    if chat_template:
        config["chat_template"] = chat_template
    return config
