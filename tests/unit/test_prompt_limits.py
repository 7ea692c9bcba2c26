"""Limits on prompts, in bytes and in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config import LimitsConfig
from headwater.errors import PromptTooLongError
from headwater.generation import SamplingParams
from headwater.services.router.requests import ChatPrompt, TextPrompt
from headwater.services.router.served_model import ServedModel

MODEL_DIR = Path(__file__).parents[1] / "data" / "text_model"


def model(**limits: int) -> ServedModel:
    return ServedModel.load(MODEL_DIR, "tiny", LimitsConfig(**limits))


async def test_bytes_of_text_are_counted_as_utf8() -> None:
    served = model(prompt_bytes=8)
    assert await served.encode(TextPrompt("12345678"))
    with pytest.raises(
        PromptTooLongError, match=r"^text: has 9 bytes, and limits\.prompt_bytes allows 8; shorten"
    ):
        await served.encode(TextPrompt("éééé1"))


async def test_all_turns_count() -> None:
    served = model(prompt_bytes=8)
    turns = (("user", "12345"), ("assistant", "1234"))
    with pytest.raises(PromptTooLongError, match=r"^chat: has 9 bytes, and limits\.prompt_bytes"):
        await served.encode(ChatPrompt(turns))


def test_tokens_may_be_fewer_than_the_context_holds() -> None:
    served = model(prompt_tokens=4)
    assert served.fit(4, SamplingParams()).max_tokens == served.max_context_tokens - 4
    with pytest.raises(
        PromptTooLongError, match=r"^prompt: has 5 tokens, and limits\.prompt_tokens allows 4; sho"
    ):
        served.fit(5, SamplingParams())
