"""The one sampler: from logits to the next token of each request.

Order, as users of the common APIs expect: penalties and bias, log probabilities taken, then
temperature, top-k, top-p, min-p, and a draw. Ties go to the lower token id.

The draw for an answer's i-th token is a function of the request's seed and of i alone, so that an
answer can be gone on with anywhere: after a preemption, or in a new process.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from headwater.generation import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwater.generation import SamplingParams
    from headwater.services.decode.grammar import Grammar


@dataclass(slots=True)
class SamplerState:
    """What the sampler remembers of one request: its seed, and which tokens it has seen."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int
    prompt_ids: torch.Tensor | None = None
    """Distinct prompt tokens, int64; None unless the repetition penalty needs them."""
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    grammar: Grammar | None = None

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_token_ids: tuple[int, ...],
        output: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> SamplerState:
        """Starts a request, or goes on after the tokens `output` of its answer.

        A `grammar` has taken them over already.
        """
        seed = secrets.randbits(64) if params.seed is None else params.seed
        state = cls(params, eos_token_ids, seed, grammar=grammar)
        if params.repetition_penalty != 1.0:
            state.prompt_ids = torch.tensor(sorted(set(prompt)), dtype=torch.int64)
        for token_id in output:
            state.note(token_id)
        return state

    def note(self, token_id: int) -> None:
        """Counts a token of the answer."""
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        self.num_output_tokens += 1


def sample(logits: torch.Tensor, state: SamplerState) -> Token:
    """Chooses the next token from FP32 logits [vocab] and notes it in the state."""
    scores = _adjusted(logits, state)
    params = state.params
    if params.temperature == 0.0:
        token_id = int(torch.argmax(scores))
    else:
        probabilities = _filtered(_tempered(scores, params.temperature), params)
        token_id = _draw(probabilities, state)
    state.note(token_id)
    if state.grammar is not None:
        state.grammar.note(token_id)
    if params.logprobs is None:
        return Token(token_id)
    return _with_logprobs(token_id, scores, params.logprobs)


def _adjusted(logits: torch.Tensor, state: SamplerState) -> torch.Tensor:
    """Logits after penalties, bias, the ban on stopping too early, and the grammar."""
    params = state.params
    scores = logits.clone()
    seen = torch.tensor(list(state.output_counts), dtype=torch.int64)
    if state.prompt_ids is not None:
        ids = torch.unique(torch.cat((state.prompt_ids, seen)))
        values = scores[ids]
        penalised = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        # A tiny penalty makes logits larger than FP32 holds.
        scores[ids] = penalised.clamp(max=torch.finfo(torch.float32).max)
    if seen.numel() and (params.presence_penalty or params.frequency_penalty):
        counts = torch.tensor(list(state.output_counts.values()), dtype=torch.float32)
        scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    if state.num_output_tokens < params.min_tokens:
        banned = params.stop_token_ids + (() if params.ignore_eos else state.eos_token_ids)
        scores[list(banned)] = -torch.inf
    if state.grammar is not None:
        state.grammar.restrict(scores)
    return scores


def _tempered(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """The scores over the temperature, up to a constant."""
    tempered = scores / temperature
    if torch.isposinf(tempered.max()):
        # Of a tiny temperature; differences tell the same, and the largest is then zero.
        return (scores - scores.max()) / temperature
    return tempered


def _filtered(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocab] with all tokens outside top-k, top-p and min-p at zero."""
    if params.top_k and params.top_k < scores.numel():
        top = torch.topk(scores, params.top_k)
        scores = torch.full_like(scores, -torch.inf).scatter_(0, top.indices, top.values)
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_p < 1.0:
        ordered, order = torch.sort(probabilities, descending=True, stable=True)
        # A token stays when the tokens before it do not reach top_p yet.
        dropped = torch.cumsum(ordered, dim=-1) - ordered >= params.top_p
        probabilities[order[dropped]] = 0.0
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    return probabilities


def _draw(probabilities: torch.Tensor, state: SamplerState) -> int:
    """An index, each as likely as its share of the sum."""
    generator = np.random.Generator(
        np.random.Philox(key=state.seed, counter=state.num_output_tokens)
    )
    cumulative = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
    # In (0, total]: the first index at or past it has a probability above zero.
    point = (1.0 - generator.random()) * float(cumulative[-1])
    return int(torch.searchsorted(cumulative, point))


def _with_logprobs(token_id: int, scores: torch.Tensor, num_top: int) -> Token:
    logprobs = torch.log_softmax(scores, dim=-1)
    top = torch.topk(logprobs, num_top) if num_top else None
    return Token(
        token_id,
        logprob=float(logprobs[token_id]),
        top_logprobs=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if top
        else (),
    )
