"""Tokens of one answer to text, as they come.

Holds back the beginning of a character whose bytes are not all there, so that no piece of text
ends inside a character. The cost per token does not depend on the length of the answer.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.services.router.text.tokenizer import TokenBytes

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer.

    Bytes that cannot be UTF-8 become U+FFFD at once. Bytes that may still become a character are
    held; if the answer ends there they are not text and are dropped.
    """

    def __init__(self, vocabulary: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skips_special = skip_special_tokens
        self._decoder = _Utf8Decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text it completes, often empty."""
        if self._skips_special and self._vocabulary.is_special(token_id):
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))
