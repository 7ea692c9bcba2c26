"""vllm.grpc.engine messages, as the gateway SMG speaks them, to and from domain types.

Scalars without presence in that protocol say "not given" with zero; where zero is not a
meaningful value it becomes our default.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from headwater.errors import InvalidRequestError
from headwater.generation import Constraint, FinishReason, SamplingParams, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.generation import Usage

_FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}

# Fields of a request as headwater.v1 names them, and as this protocol does.
_FIELD_NAMES = {
    "n": "sampling_params.n",
    "prompt": "input",
    "sampling": "sampling_params",
    "token_ids.ids": "tokenized.input_ids",
}


def in_vllm_terms(error: InvalidRequestError) -> InvalidRequestError:
    """The same error, with the field as this protocol calls it."""
    for ours, theirs in _FIELD_NAMES.items():
        rest = error.field.removeprefix(ours)
        if rest != error.field and (not rest or rest[0] in ".["):
            return type(error)(theirs + rest, error.problem)
    return error


def sampling_from_vllm(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequestError for a value out of range and for what is not offered yet."""
    _refuse_unsupported(message)
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        # The protocol's seed is signed, ours is not; any fixed mapping will do.
        seed=message.seed & 0xFFFF_FFFF if message.HasField("seed") else None,
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        include_stop=message.include_stop_str_in_output,
        constraint=_constraint(message),
    )


def _constraint(message: pb.SamplingParams) -> Constraint | None:
    kind = message.WhichOneof("constraint")
    if kind == "json_schema":
        return Constraint("json_schema", message.json_schema)
    if kind == "json_object":
        return Constraint("json_schema", '{"type": "object"}')
    if kind == "regex":
        return Constraint("regex", message.regex)
    if kind == "choice":
        return Constraint("choice", json.dumps(list(message.choice.choices)))
    if kind == "grammar":
        return Constraint("grammar", message.grammar)
    return None


def _refuse_unsupported(message: pb.SamplingParams) -> None:
    if message.HasField("structural_tag"):
        raise InvalidRequestError(
            "sampling_params.structural_tag",
            "structural tags are not offered; give a JSON schema, a regex or a grammar",
        )
    if message.HasField("prompt_logprobs"):
        raise InvalidRequestError(
            "sampling_params.prompt_logprobs", "log probabilities of the prompt are not offered"
        )
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequestError(
            "sampling_params.truncate_prompt_tokens", "prompts are not cut; shorten the prompt"
        )


def chunk_to_vllm(tokens: Sequence[Token], usage: Usage, index: int) -> pb.GenerateResponse:
    """A piece of the streamed answer `index`; `usage` counts up to here."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=[token.id for token in tokens],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=_logprobs(tokens),
            index=index,
        )
    )


def complete_to_vllm(
    tokens: Sequence[Token],
    usage: Usage,
    finish_reason: FinishReason,
    index: int,
    *,
    matched_stop: str | None = None,
    stop_token_id: int | None = None,
) -> pb.GenerateResponse:
    """The end of the answer `index` with all its tokens; at most one of the stops is given."""
    complete = pb.GenerateComplete(
        output_ids=[token.id for token in tokens],
        finish_reason=_FINISH_NAMES[finish_reason],
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        output_logprobs=_logprobs(tokens),
        index=index,
    )
    if matched_stop is not None:
        complete.matched_stop_str = matched_stop
    elif stop_token_id is not None:
        complete.matched_token_id = stop_token_id
    return pb.GenerateResponse(complete=complete)


def _logprobs(tokens: Sequence[Token]) -> pb.OutputLogProbs | None:
    """None unless log probabilities were asked for."""
    if not tokens or tokens[0].logprob is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[token.logprob or 0.0 for token in tokens],
        token_ids=[token.id for token in tokens],
        top_logprobs=[
            pb.TopLogProbs(
                token_ids=[token_id for token_id, _ in token.top_logprobs],
                values=[logprob for _, logprob in token.top_logprobs],
            )
            for token in tokens
        ],
    )
