"""A tokenizer for a vocabulary of any size: bytes in, and words out of whatever a model says.

Owns tokenizer.json and tokenizer_config.json of synthetic checkpoints.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|end|>", "<|turn|>")
"""They follow the 256 bytes: ids 256 and 257."""

_SPACE = "\u0120"  # how byte-level tokenizers write a space
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer that encodes text as bytes and decodes every id below `vocab_size`."""
    symbols = itertools.chain(
        sorted(pre_tokenizers.ByteLevel.alphabet()), SPECIAL_TOKENS, _made_up_words()
    )
    vocabulary = {symbol: i for i, symbol in enumerate(itertools.islice(symbols, vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": _CHAT_TEMPLATE, "eos_token": SPECIAL_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _made_up_words() -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield _SPACE + "".join(letters)
