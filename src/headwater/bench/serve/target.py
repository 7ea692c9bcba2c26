"""Where the load goes: a router over headwater.v1, or any OpenAI endpoint."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from headwater.client import Client
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
)
from headwater.generation import SamplingParams
from headwater.rpc.channel import open_channel
from headwater.rpc.link import PLAIN
from headwater.v1 import router_service_pb2, router_service_pb2_grpc
from headwater.wire.status import error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from headwater.bench.serve.load import LoadRequest
    from headwater.rpc.link import Link

# Common English words, most of them one token; an OpenAI endpoint takes text, not token ids.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "group", "country", "part", "place", "case", "week",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at one moment; the counts of the prompt come with the last piece, if at all."""

    num_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the load has to respect."""

    name: str
    vocab_size: int
    max_context_tokens: int


class Target(Protocol):
    """Something that answers."""

    def stream(self, request: LoadRequest) -> AsyncGenerator[Piece, None]:
        """Sends a request. Raises HeadwaterError; closing it hangs up."""

    async def limits(self) -> ModelLimits:
        """The served model. Raises HeadwaterError when nobody answers."""

    async def close(self) -> None:
        """Closes the connections."""


class RouterTarget:
    """headwater.v1.RouterService; answers are greedy and as long as asked for."""

    def __init__(self, address: str, link: Link = PLAIN) -> None:
        self._address = address
        self._link = link
        self._client = Client(address, link)

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Piece, None]:
        """See Target."""
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        prompt = request.prompt
        events = (
            self._client.chat([("user", prompt)], params)
            if isinstance(prompt, str)
            else self._client.generate(prompt, params)
        )
        async with aclosing(events):
            async for event in events:
                if event.usage is not None:
                    usage = event.usage
                    yield Piece(len(event.tokens), usage.prompt_tokens, usage.cached_tokens)
                elif event.tokens:
                    yield Piece(len(event.tokens))

    async def limits(self) -> ModelLimits:
        """See Target."""
        async with open_channel(self._address, self._link) as channel:
            stub = router_service_pb2_grpc.RouterServiceStub(channel)
            try:
                model = await stub.GetModel(router_service_pb2.GetModelRequest(), timeout=10)
            except grpc.aio.AioRpcError as failure:
                raise error_from_rpc(failure) from failure
        return ModelLimits(model.model_name, model.vocab_size, model.max_context_tokens)

    async def close(self) -> None:
        """See Target."""
        await self._client.close()


class OpenAiTarget:
    """/v1/completions and /v1/chat/completions of any server; needs the package openai.

    Lengths are near what was asked for, as the server's tokenizer is not known; what it says of
    usage counts.
    """

    def __init__(self, base_url: str, model: str, *, max_context_tokens: int) -> None:
        try:
            import openai
        except ImportError as error:
            raise ConfigError(
                "--openai needs the package openai; install it with `pip install openai`"
            ) from error
        self._openai = openai
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0)
        self._model = model
        self._max_context_tokens = max_context_tokens

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Piece, None]:
        """See Target."""
        options: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"ignore_eos": True},
        }
        try:
            if isinstance(request.prompt, str):
                turns: Any = [{"role": "user", "content": request.prompt}]
                chunks: Any = await self._client.chat.completions.create(messages=turns, **options)
            else:
                text = " ".join(_WORDS[token % len(_WORDS)] for token in request.prompt)
                chunks = await self._client.completions.create(prompt=text, **options)
            async with chunks:
                async for chunk in chunks:
                    yield _piece_of(chunk)
        except self._openai.APIError as failure:
            raise _error_of(failure) from failure

    async def limits(self) -> ModelLimits:
        """See Target; the endpoint tells neither number, so they are the caller's."""
        return ModelLimits(self._model, len(_WORDS), self._max_context_tokens)

    async def close(self) -> None:
        """See Target."""
        await self._client.close()


def _piece_of(chunk: Any) -> Piece:
    texts = [
        getattr(c, "text", None) or getattr(getattr(c, "delta", None), "content", None)
        for c in chunk.choices
    ]
    usage = chunk.usage
    # Servers send a token per chunk, as good as always.
    num_tokens = sum(1 for text in texts if text)
    if usage is None:
        return Piece(num_tokens)
    details = getattr(usage, "prompt_tokens_details", None)
    return Piece(num_tokens, usage.prompt_tokens, getattr(details, "cached_tokens", None))


def _error_of(failure: Any) -> HeadwaterError:
    status = getattr(failure, "status_code", None)
    if status == 429:
        return QueueFullError(str(failure))
    if status == 503 or status is None:
        return UnavailableError(str(failure))
    if 400 <= status < 500:
        return InvalidRequestError("request", str(failure))
    return InternalError(str(failure))
