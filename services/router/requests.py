"""What a caller asks of the router, in domain terms."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from headwater.errors import InvalidRequestError
from headwater.generation import SamplingParams, check_request_id

MAX_ANSWERS = 16


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


def operation_of(prompt: Prompt) -> str:
    """The prompt's kind, as gen_ai.operation.name has it.

    Conversations that came through the gateway are tokens by now.
    """
    return "chat" if isinstance(prompt, ChatPrompt) else "text_completion"


def new_request_id() -> str:
    """A name that no other request has."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class RouterRequest:
    """One request for `n` answers; with `wants_text` False only tokens are delivered.

    `objective_class` names what the caller is promised; empty means the default class.
    `skip_special_tokens` leaves tokens that mark structure out of the text. Requests of a higher
    `priority` run first.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = field(default_factory=new_request_id)
    wants_text: bool = True
    skip_special_tokens: bool = True
    n: int = 1
    priority: int = 0
    objective_class: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequestError when the request id is too long or `n` out of range."""
        check_request_id(self.request_id)
        if not 1 <= self.n <= MAX_ANSWERS:
            raise InvalidRequestError("n", f"must be between 1 and {MAX_ANSWERS}, got {self.n}")
