"""What the router knows of the model: its texts and its limits, not its weights."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.config import LimitsConfig
from headwater.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from headwater.generation import SamplingParams, check_token_id
from headwater.model.spec import ModelSpec
from headwater.services.router.requests import ChatPrompt, Prompt, TextPrompt
from headwater.services.router.text.chat_template import ChatTemplate
from headwater.services.router.text.detokenizer import Detokenizer
from headwater.services.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CONFIG_FILE = "config.json"
# Encoding this much takes about a millisecond; longer texts must not hold up other requests.
_INLINE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as its callers see it."""

    name: str
    model_dir: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    architectures: tuple[str, ...] = ()
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @classmethod
    def load(cls, model_dir: Path, name: str, limits: LimitsConfig | None = None) -> ServedModel:
        """Reads config.json, tokenizer.json and the chat template of a model folder.

        Raises CheckpointError when one is missing or broken.
        """
        path = model_dir / CONFIG_FILE
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
        spec = ModelSpec.from_config(config, str(path))
        return cls(
            name=name,
            model_dir=model_dir,
            tokenizer=Tokenizer.load(model_dir),
            chat_template=ChatTemplate.load(model_dir),
            max_context_tokens=spec.max_context_tokens,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            bos_token_id=spec.bos_token_id,
            architectures=(spec.architecture,),
            limits=limits or LimitsConfig(),
        )

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, at least one.

        Raises InvalidRequestError when the prompt is empty or holds what the model does not know.
        """
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise InvalidRequestError("text", "must not be empty")
            self._check_bytes("text", prompt.text)
            return await self._tokenize("text", prompt.text, add_special_tokens=True)
        if isinstance(prompt, ChatPrompt):
            self._check_bytes("chat", *(content for _, content in prompt.turns))
            text = self._lay_out(prompt)
            # The template has written the special tokens already.
            return await self._tokenize("chat", text, add_special_tokens=False)
        if not prompt.ids:
            raise InvalidRequestError("token_ids.ids", "must not be empty")
        for position, token_id in enumerate(prompt.ids):
            check_token_id(f"token_ids.ids[{position}]", token_id, self.vocab_size)
        return prompt.ids

    def readable(self, prompt: Prompt) -> tuple[tuple[str, str], ...]:
        """The prompt as (role, text) pairs, for traces that are to hold it."""
        if isinstance(prompt, ChatPrompt):
            return prompt.turns
        text = prompt.text if isinstance(prompt, TextPrompt) else self.text_of_ids(prompt.ids)
        return (("user", text),)

    def text_of_ids(self, token_ids: Iterable[int]) -> str:
        """What tokens say, special ones included."""
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        return "".join(map(detokenizer.push, token_ids))

    def fit(self, num_prompt_tokens: int, sampling: SamplingParams) -> SamplingParams:
        """Checks the request against the model's limits; fills in `max_tokens` where absent.

        Raises PromptTooLongError when prompt and answer exceed the context, InvalidRequestError
        when a token id is outside the vocabulary.
        """
        sampling.check_vocabulary(self.vocab_size)
        if 0 < self.limits.prompt_tokens < num_prompt_tokens:
            raise PromptTooLongError(
                "prompt",
                f"has {num_prompt_tokens} tokens, and limits.prompt_tokens allows "
                f"{self.limits.prompt_tokens}; shorten the prompt",
            )
        room = self.max_context_tokens - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                "prompt",
                f"has {num_prompt_tokens} tokens, but prompt and answer together may have at most "
                f"{self.max_context_tokens}; shorten the prompt",
            )
        if sampling.max_tokens is None:
            return dataclasses.replace(sampling, max_tokens=room)
        if sampling.max_tokens > room:
            raise PromptTooLongError(
                "sampling.max_tokens",
                f"{num_prompt_tokens} prompt tokens and {sampling.max_tokens} new ones exceed the "
                f"context of {self.max_context_tokens} tokens; ask for at most {room}",
            )
        return sampling

    def _check_bytes(self, field_name: str, *texts: str) -> None:
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > self.limits.prompt_bytes:
            raise PromptTooLongError(
                field_name,
                f"has {num_bytes} bytes, and limits.prompt_bytes allows "
                f"{self.limits.prompt_bytes}; shorten it",
            )

    def _lay_out(self, prompt: ChatPrompt) -> str:
        if self.chat_template is None:
            raise InvalidRequestError(
                "chat", f"the model {self.name} has no chat template; give text or token_ids"
            )
        if not prompt.turns:
            raise InvalidRequestError("chat.messages", "must not be empty")
        return self.chat_template.render(
            {"role": role, "content": content} for role, content in prompt.turns
        )

    async def _tokenize(
        self, field_name: str, text: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        if len(text) <= _INLINE_CHARS:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await asyncio.to_thread(
                self.tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        if not ids:
            raise InvalidRequestError(field_name, "holds no token")
        check_token_id(field_name, max(ids), self.vocab_size)
        return ids
