"""What a caller asks of the router, in domain terms."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from headwater.generation import SamplingParams, check_request_id


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, continued as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation: (role, content) pairs, oldest first, laid out by the chat template."""

    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, continued as they are."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


def _new_request_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class RouterRequest:
    """One request; with `wants_text` False only tokens are delivered.

    `skip_special_tokens` leaves tokens that mark structure out of the text.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = field(default_factory=_new_request_id)
    wants_text: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidRequestError when the request id is too long."""
        check_request_id(self.request_id)
