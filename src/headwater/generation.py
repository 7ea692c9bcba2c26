"""What a generation is asked to do and what it yields: plain values, shared by all processes.

Owns no state and does no work; the wire forms are in headwater.wire.
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, field
from typing import Literal

from headwater.errors import InvalidRequestError

MAX_REQUEST_ID_CHARS = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_CONSTRAINT_CHARS = 1_000_000


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must conform to.

    `text` is a JSON schema; a regular expression; a JSON array of strings, one of which the answer
    must be; or a grammar in Lark's or GBNF's notation.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        """Raises InvalidRequestError when it is too long, or a choice is no list of strings."""
        if len(self.text) > MAX_CONSTRAINT_CHARS:
            raise InvalidRequestError(
                "sampling.constraint",
                f"at most {MAX_CONSTRAINT_CHARS} characters, got {len(self.text)}",
            )
        if self.kind == "choice" and not _is_list_of_strings(self.text):
            raise InvalidRequestError(
                "sampling.constraint", "choice: must be a JSON array of one or more strings"
            )


def _is_list_of_strings(text: str) -> bool:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    is_list = isinstance(values, list) and bool(values)
    return is_list and all(isinstance(value, str) for value in values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the fields and limits of headwater.v1.SamplingParams.

    `max_tokens` None means as many as the context holds; `top_k` 0 means all; `logprobs` None
    means none, 0 the chosen token's only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequestError when a value is out of its range."""
        _require_between("temperature", self.temperature, 0.0, 100.0)
        _require_between("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _require_between("min_p", self.min_p, 0.0, 1.0)
        _require_between("repetition_penalty", self.repetition_penalty, 0.0, 10.0, is_low_open=True)
        _require_between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            _require_between(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.top_k < 0:
            raise InvalidRequestError("sampling.top_k", f"must not be negative, got {self.top_k}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                "sampling.logprobs", f"must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(
                "sampling.max_tokens", f"must be at least 1, got {self.max_tokens}"
            )
        if self.min_tokens < 0:
            raise InvalidRequestError(
                "sampling.min_tokens", f"must not be negative, got {self.min_tokens}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "sampling.min_tokens",
                f"{self.min_tokens} is more than max_tokens, {self.max_tokens}",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                "sampling.stop_token_ids",
                f"at most {MAX_STOP_TOKEN_IDS} are allowed, got {len(self.stop_token_ids)}",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                "sampling.stop", f"at most {MAX_STOP_STRINGS} are allowed, got {len(self.stop)}"
            )
        for i, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"sampling.stop[{i}]",
                    f"must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}",
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError when a token id is not below `vocab_size`."""
        for token_id in self.logit_bias:
            check_token_id("sampling.logit_bias", token_id, vocab_size)
        for token_id in self.stop_token_ids:
            check_token_id("sampling.stop_token_ids", token_id, vocab_size)


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError when the caller's name for the request is too long."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            "request_id", f"at most {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}"
        )


def check_token_id(field_name: str, token_id: int, vocab_size: int) -> None:
    """Raises InvalidRequestError unless 0 <= token_id < vocab_size."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            field_name,
            f"token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})",
        )


def _require_between(
    name: str, value: float, low: float, high: float, *, is_low_open: bool = False
) -> None:
    is_low_ok = value > low if is_low_open else value >= low
    if not (math.isfinite(value) and is_low_ok and value <= high):
        bracket = "(" if is_low_open else "["
        raise InvalidRequestError(
            f"sampling.{name}", f"must be in {bracket}{low:g}, {high:g}], got {value!r}"
        )


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `logprob` in nat, None unless asked for.

    `top_logprobs` holds (token id, logprob) pairs, most likely first.
    """

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one decode step gave one request; `finish_reason` is set on the last event only."""

    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds; see headwater.v1.Timings."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    handover_seconds: float = 0.0
    decode_seconds: float = 0.0
    time_to_first_token_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What the router streams: new text and tokens of the answer `index`.

    The last event of an answer carries finish reason, usage and timings.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prefill_progress: float | None = None
    matched_stop: str | None = None
    stop_token_id: int | None = None
    index: int = 0
