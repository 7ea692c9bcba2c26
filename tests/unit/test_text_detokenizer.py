"""Incremental decoding: whole characters only, the same text however tokens are cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headwater.services.router.text.detokenizer import Detokenizer
from headwater.services.router.text.tokenizer import Tokenizer

MODEL_DIR = Path(__file__).parents[1] / "data" / "text_model"
ALPHABETS = {
    "ascii": "abc XYZ.,\n\t",
    "latin": "äöüßéñ",
    "cjk": "你好世界日本語한국어",
    "emoji": "😀🎉👩‍👩‍👧‍👦🇫🇷🏳️‍🌈",
    "combining": "e\u0301a\u0308o\u0302\u0323",
    "astral": "\U0001f701\U00010348\U0010ffff",
    "replacement": "\ufffd",
}


class _Bytes:
    """A vocabulary made for the test: the given pieces, of which some are special."""

    def __init__(self, pieces: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._special = special

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def _random_text(random_source: random.Random) -> str:
    alphabet = "".join(ALPHABETS.values())
    return "".join(random_source.choices(alphabet, k=random_source.randrange(1, 80)))


def _cut(data: bytes, random_source: random.Random) -> list[bytes]:
    pieces = []
    while data:
        size = random_source.randrange(1, 6)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@pytest.mark.parametrize("seed", range(50))
def test_pieces_of_any_cut_add_up_to_the_text(seed: int) -> None:
    random_source = random.Random(seed)
    text = _random_text(random_source)
    pieces = _cut(text.encode(), random_source)
    detokenizer = Detokenizer(_Bytes(pieces))
    seen = b""
    shown = ""
    for i, piece in enumerate(pieces):
        seen += piece
        shown += detokenizer.push(i)
        # What is shown is all that is complete, at once.
        assert shown == seen.decode(errors="ignore")
    assert shown == text


@pytest.mark.parametrize("name", sorted(ALPHABETS))
def test_real_tokenizer_gives_back_each_script(name: str) -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    text = f"The {ALPHABETS[name]} and {ALPHABETS[name] * 3}."
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(detokenizer.push(i) for i in ids) == text


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_never_show_half_a_character(seed: int) -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    ids = random.Random(seed).choices(range(3, tokenizer.vocab_size), k=200)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(i) for i in ids)
    # Nonsense bytes become U+FFFD as in any UTF-8 decoder; only the end may be missing.
    whole = b"".join(tokenizer.token_bytes(i) for i in ids).decode(errors="replace")
    assert whole.startswith(text)
    assert whole[len(text) :] in ("", "\ufffd")


def test_invalid_bytes_do_not_hold_up_what_follows() -> None:
    detokenizer = Detokenizer(_Bytes([b"\xff", b"\xf0\x9f", b"ok", b"\xe4\xbd", b"\xa0"]))
    assert [detokenizer.push(i) for i in range(5)] == ["\ufffd", "", "\ufffdok", "", "你"]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    vocabulary = _Bytes([b"<|end|>", b"a"], frozenset({0}))
    hiding = Detokenizer(vocabulary)
    showing = Detokenizer(vocabulary, skip_special_tokens=False)
    assert [hiding.push(0), hiding.push(1)] == ["", "a"]
    assert [showing.push(0), showing.push(1)] == ["<|end|>", "a"]


def test_special_token_inside_a_character_does_not_break_it() -> None:
    detokenizer = Detokenizer(_Bytes([b"\xc3", b"<|x|>", b"\xa9"], frozenset({1})))
    assert [detokenizer.push(i) for i in range(3)] == ["", "", "é"]
