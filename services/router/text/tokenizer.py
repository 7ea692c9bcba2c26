"""The checkpoint's tokenizer.json: text to token ids, and the bytes that each token stands for.

Owns the vocabulary. Turning a stream of tokens into text is headwater.services.router.text.
detokenizer's business.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

from headwater.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
_BYTE_TOKEN_CHARS = len("<0x00>")


class TokenBytes(Protocol):
    """What a token stands for; the part of a tokenizer that decoding needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters; empty for an unknown id."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure and is no text."""


class Tokenizer:
    """A loaded tokenizer.json."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: _Spelling) -> None:
        self._backend = backend
        self._spelling = spelling
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes_by_id: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Reads `model_dir`/tokenizer.json.

        Raises CheckpointError when the file is missing, broken, or of a kind whose tokens cannot
        be turned into bytes one by one.
        """
        path = model_dir / TOKENIZER_FILE
        try:
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); the router needs the tokenizer that "
                "belongs to the model"
            ) from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: is not UTF-8 text: {error}") from error
        try:
            spelling = _spelling_of(json.loads(source).get("decoder"), str(path))
            backend = tokenizers.Tokenizer.from_str(source)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: is not a valid tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, spelling)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`; with the tokenizer's own begin or end tokens if asked for.

        Releases the interpreter lock, so long texts can be encoded in a thread.
        """
        # encode() holds the lock throughout, the batch call does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def token_id(self, token: str) -> int | None:
        """Id of the token spelt exactly so, or None."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure (begin, end, role) and is no text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for; empty for an id outside the vocabulary."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            spelt = self._backend.id_to_token(token_id)
            known = b"" if spelt is None else self._spelling.to_bytes(spelt)
            self._bytes_by_id[token_id] = known
        return known


class _Spelling(Protocol):
    """How the vocabulary writes bytes as text."""

    def to_bytes(self, spelt: str) -> bytes:
        """The bytes behind a vocabulary entry."""


class _ByteLevel:
    """Every byte is written as one printable character (GPT-2 and its descendants)."""

    def __init__(self) -> None:
        # Printable Latin-1 bytes stand for themselves, the others are numbered from U+0100 on.
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = (byte for byte in range(256) if byte not in printable)
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of.update({chr(0x100 + i): byte for i, byte in enumerate(others)})

    def to_bytes(self, spelt: str) -> bytes:
        """The bytes; a token with any other character, such as an added one, is plain text."""
        try:
            return bytes([self._byte_of[char] for char in spelt])
        except KeyError:
            return spelt.encode()


class _ByteFallback:
    """Text with a stand-in for the space; bytes without a token of their own are <0xHH>."""

    def __init__(self, replacements: list[tuple[str, str]]) -> None:
        self._replacements = replacements

    def to_bytes(self, spelt: str) -> bytes:
        """The bytes behind a vocabulary entry."""
        if len(spelt) == _BYTE_TOKEN_CHARS and spelt.startswith("<0x") and spelt.endswith(">"):
            try:
                return bytes([int(spelt[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replacements:
            spelt = spelt.replace(old, new)
        return spelt.encode()


def _spelling_of(decoder: Any, source: str) -> _Spelling:
    """Chooses the spelling by the `decoder` entry of a tokenizer.json."""
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _ByteLevel()
    # Strip takes a space off the beginning of a text; an answer goes on from a prompt, so its
    # beginning is not the text's.
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaces = [step for step in steps if step.get("type") == "Replace"]
        if all(isinstance(step.get("pattern", {}).get("String"), str) for step in replaces):
            return _ByteFallback(
                [(step["pattern"]["String"], step["content"]) for step in replaces]
            )
    raise CheckpointError(
        f"{source}: decoder: {kinds or 'none'} is not supported; supported are ByteLevel, and "
        "Replace (of strings) with ByteFallback"
    )


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
