"""Structured output: which tokens may come next, by JSON schema, regular expression or grammar.

llguidance computes the masks; it was chosen over xgrammar because it compiles a constraint in
milliseconds and needs no other framework. One Grammar belongs to one sequence.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from

from headwater.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headwater.generation import Constraint

_FIELD = "sampling.constraint"
# Room for indentation, but not for a model that writes blanks for ever.
_JSON_WHITESPACE = r"[ \n]{0,16}"


class GrammarCompiler:
    """Compiles constraints for one model; may be called from several threads."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = model_dir / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, constraint: Constraint, output: Sequence[int] = ()) -> Grammar:
        """A grammar in the state after the tokens `output`.

        Raises InvalidRequestError when the constraint is not well formed, or the output breaks it.
        """
        try:
            grammar = _definition(constraint)
        except ValueError as error:
            raise InvalidRequestError(_FIELD, f"{constraint.kind}: {error}") from error
        matcher = LLMatcher(self._loaded_tokenizer(), grammar)
        if matcher.is_error():
            raise InvalidRequestError(_FIELD, f"{constraint.kind}: {matcher.get_error()}")
        if output and not matcher.consume_tokens(list(output)):
            raise InvalidRequestError(_FIELD, "the tokens generated before do not fit it")
        return Grammar(matcher, self._vocab_size, self._eos_token_ids)

    def _loaded_tokenizer(self) -> LLTokenizer:
        """Loaded with the first constraint, for it takes a while and few requests need it."""
        with self._lock:
            if self._tokenizer is None:
                if not self._eos_token_ids:
                    raise InvalidRequestError(
                        _FIELD, "the model has no end-of-sequence token, which it needs"
                    )
                self._tokenizer = LLTokenizer(
                    self._tokenizer_file.read_text(encoding="utf-8"),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_token_ids[0],
                )
            return self._tokenizer


def _definition(constraint: Constraint) -> str:
    if constraint.kind == "json_schema":
        options: Any = {"whitespace_pattern": _JSON_WHITESPACE}
        return str(LLMatcher.grammar_from_json_schema(constraint.text, defaults=options))
    return str(grammar_from(constraint.kind, constraint.text))


class Grammar:
    """The state of one constrained answer."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow any more."""
        return bool(self._matcher.is_stopped())

    def restrict(self, scores: torch.Tensor) -> None:
        """Sets the scores [vocab] of all tokens that may not follow to -inf, in place."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(words, count=self._vocab_size, bitorder="little")
        scores.masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)

    def note(self, token_id: int) -> None:
        """Takes the chosen token over; the end of the sequence changes nothing."""
        if token_id not in self._eos_token_ids:
            self._matcher.consume_token(token_id)
