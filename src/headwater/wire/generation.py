"""headwater.v1 generation messages to and from headwater.generation."""

from __future__ import annotations

from headwater.errors import InvalidRequestError
from headwater.generation import Constraint, FinishReason, SamplingParams, Timings, Token, Usage
from headwater.v1 import generation_pb2 as pb

_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}

_OPTIONAL_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "max_tokens",
    "min_tokens",
)


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Fills absent fields with the documented defaults.

    Raises InvalidRequestError when a value is out of its range.
    """
    given = {
        name: getattr(message, name) for name in _OPTIONAL_SAMPLING_FIELDS if message.HasField(name)
    }
    return SamplingParams(
        **given,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        include_stop=message.include_stop,
        constraint=_constraint_from_pb(message),
    )


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """The wire form; a field that is None stays absent."""
    message = pb.SamplingParams(
        logit_bias=params.logit_bias,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        stop=params.stop,
        include_stop=params.include_stop,
    )
    for name in _OPTIONAL_SAMPLING_FIELDS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    if params.constraint is not None:
        setattr(message.constraint, params.constraint.kind, params.constraint.text)
    return message


def _constraint_from_pb(message: pb.SamplingParams) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    kind = message.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError("sampling.constraint", "one of its kinds must be given")
    return Constraint(kind, getattr(message.constraint, kind))


def token_from_pb(message: pb.Token) -> Token:
    """One token with its log probabilities, if any."""
    return Token(
        id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def token_to_pb(token: Token) -> pb.Token:
    """One token with its log probabilities, if any."""
    return pb.Token(
        token_id=token.id,
        logprob=token.logprob,
        top_logprobs=[
            pb.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in token.top_logprobs
        ],
    )


def finish_reason_from_pb(value: pb.FinishReason) -> FinishReason | None:
    """None for UNSPECIFIED and for reasons newer than this program."""
    return _FINISH_FROM_PB.get(value)


def finish_reason_to_pb(reason: FinishReason | None) -> pb.FinishReason:
    """UNSPECIFIED for None."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PB[reason]


def usage_from_pb(message: pb.Usage) -> Usage:
    """Token counts of a request."""
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def usage_to_pb(usage: Usage) -> pb.Usage:
    """Token counts of a request."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def timings_from_pb(message: pb.Timings) -> Timings:
    """Durations of a request's parts."""
    return Timings(**{name: getattr(message, name) for name in Timings.__slots__})


def timings_to_pb(timings: Timings) -> pb.Timings:
    """Durations of a request's parts."""
    return pb.Timings(**{name: getattr(timings, name) for name in Timings.__slots__})
