"""The tokenizer: ids, bytes behind tokens, and what a broken file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.services.router.text.tokenizer import Tokenizer

MODEL_DIR = Path(__file__).parents[1] / "data" / "text_model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR)


def _write_with_decoder(folder: Path, decoder: Any) -> None:
    content = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = decoder
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def test_text_comes_back_byte_by_byte(tokenizer: Tokenizer) -> None:
    text = "The capital of France is Paris. Grüße, 你好 😀\n\ttab \x00 end"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_every_byte_has_its_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert single >= {bytes([byte]) for byte in range(256)}


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user", add_special_tokens=False)
    assert ids[0] == tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(ids[1])
    assert tokenizer.token_bytes(1) == b"<|im_start|>"


def test_ids_outside_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_id("no such token") is None


def test_byte_fallback_spelling(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0xF0>": 1, "<0x9F>": 2, "\u2581Par": 3, "<0xGG>": 4, "is": 5}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_bytes(i) for i in range(1, 6)] == [
        b"\xf0",
        b"\x9f",
        b" Par",
        b"<0xGG>",
        b"is",
    ]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', '"text"'])
def test_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
                {"type": "ByteFallback"},
            ],
        },
    ],
)
def test_decoders_that_do_not_work_token_by_token_are_refused(tmp_path: Path, decoder: Any) -> None:
    _write_with_decoder(tmp_path, decoder)
    with pytest.raises(CheckpointError, match=r"decoder: .* is not supported"):
        Tokenizer.load(tmp_path)
