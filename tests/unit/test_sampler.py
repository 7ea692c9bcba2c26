"""The sampler against what its parameters promise, on seeded random logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headwater.errors import InvalidRequestError
from headwater.generation import SamplingParams
from headwater.services.decode.sampler import SamplerState, sample

VOCAB = 50
EOS = (3,)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def state(prompt: tuple[int, ...] = (1, 2), **params: Any) -> SamplerState:
    return SamplerState.create(SamplingParams(**params), prompt, EOS)


def draws(scores: torch.Tensor, count: int, **params: Any) -> list[int]:
    sampler = state(seed=7, **params)
    return [sample(scores, sampler).id for _ in range(count)]


def test_greedy_takes_the_largest() -> None:
    assert sample(logits(), state(temperature=0.0)).id == int(logits().argmax())


def test_greedy_ties_go_to_the_lower_id() -> None:
    scores = torch.zeros(VOCAB)
    scores[[9, 4, 30]] = 1.0
    assert sample(scores, state(temperature=0.0)).id == 4


def test_frequencies_follow_the_softmax() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0])
    chosen = torch.tensor(draws(scores, 20_000))
    seen = torch.bincount(chosen, minlength=3) / len(chosen)
    torch.testing.assert_close(seen, torch.softmax(scores, 0), atol=0.015, rtol=0)


def test_an_answer_can_be_gone_on_with_anywhere() -> None:
    whole = state(seed=4, repetition_penalty=1.2, frequency_penalty=0.3)
    tokens = [sample(logits(i), whole).id for i in range(30)]
    for cut in (0, 1, 17, 29):
        params = SamplingParams(seed=4, repetition_penalty=1.2, frequency_penalty=0.3)
        rest = SamplerState.create(params, (1, 2), EOS, tokens[:cut])
        assert [sample(logits(i), rest).id for i in range(cut, 30)] == tokens[cut:]


def test_the_full_range_of_seeds() -> None:
    for seed in (0, 2**63, 2**64 - 1):
        assert 0 <= sample(logits(), state(seed=seed)).id < VOCAB


def test_temperature_sharpens() -> None:
    scores = torch.tensor([0.0, 1.0])
    share = sum(draws(scores, 5000, temperature=0.5)) / 5000
    assert share == pytest.approx(1 / (1 + math.exp(-2.0)), abs=0.02)


def test_a_seed_repeats_and_another_differs() -> None:
    first, again = state(seed=11), state(seed=11)
    other = state(seed=12)
    runs = [[sample(logits(i), s).id for i in range(40)] for s in (first, again, other)]
    assert runs[0] == runs[1] != runs[2]


def test_top_k_keeps_exactly_k_even_with_ties() -> None:
    assert set(draws(logits(), 2000, top_k=3)) <= set(logits().topk(3).indices.tolist())
    assert len(set(draws(torch.zeros(VOCAB), 2000, top_k=3))) == 3


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert set(draws(probabilities.log(), 3000, top_p=0.7)) == {0, 1}
    assert set(draws(probabilities.log(), 3000, top_p=0.85)) == {0, 1, 2}
    assert set(draws(probabilities.log(), 200, top_p=0.01)) == {0}


def test_min_p_is_relative_to_the_largest() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert set(draws(probabilities.log(), 3000, min_p=0.25)) == {0, 1, 2}


def test_repetition_penalty_reaches_prompt_and_answer() -> None:
    scores = torch.full((VOCAB,), -10.0)
    scores[1], scores[5], scores[8] = 4.0, 3.0, 2.5
    sampler = state(prompt=(1,), temperature=0.0, repetition_penalty=2.0)
    # 1 falls to 2.0 at once; 5 falls to 1.5 once it is chosen; then 8, then 1 again.
    assert [sample(scores, sampler).id for _ in range(3)] == [5, 8, 1]


def test_repetition_penalty_pushes_negative_logits_down() -> None:
    scores = torch.full((VOCAB,), -100.0)
    scores[1], scores[5] = -1.0, -1.5
    assert sample(scores, state(prompt=(1,), temperature=0.0, repetition_penalty=2.0)).id == 5


def test_presence_and_frequency_count_only_the_answer() -> None:
    scores = torch.full((VOCAB,), -10.0)
    scores[1], scores[5] = 1.0, 0.0
    present = state(prompt=(1,), temperature=0.0, presence_penalty=0.6)
    assert [sample(scores, present).id for _ in range(3)] == [1, 1, 1]
    frequent = state(prompt=(1,), temperature=0.0, frequency_penalty=0.6)
    assert [sample(scores, frequent).id for _ in range(3)] == [1, 1, 5]


def test_logit_bias() -> None:
    assert sample(logits(), state(temperature=0.0, logit_bias={17: 100.0})).id == 17
    best = int(logits().argmax())
    assert sample(logits(), state(temperature=0.0, logit_bias={best: -100.0})).id != best


def test_min_tokens_bans_every_stop() -> None:
    scores = torch.full((VOCAB,), -1.0)
    scores[3], scores[9], scores[20] = 5.0, 4.0, 3.0
    sampler = state(temperature=0.0, min_tokens=2, stop_token_ids=(9,))
    assert [sample(scores, sampler).id for _ in range(3)] == [20, 20, 3]


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    token = sample(logits(), state(seed=1, top_k=2, temperature=0.3, logprobs=4))
    expected = torch.log_softmax(logits(), 0)
    assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-6)
    assert [i for i, _ in token.top_logprobs] == expected.topk(4).indices.tolist()
    alone = sample(logits(), state(seed=1, logprobs=0))
    assert alone.logprob is not None
    assert alone.top_logprobs == ()
    assert sample(logits(), state(seed=1)).logprob is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 101.0}),
        ("top_k", -1),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop_token_ids", tuple(range(65))),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(f"sampling.{field}")


def test_token_ids_must_be_in_the_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        SamplingParams(stop_token_ids=(VOCAB,)).check_vocabulary(VOCAB)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        SamplingParams(logit_bias={VOCAB: 1.0}).check_vocabulary(VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.4e-45),
        SamplingParams(temperature=1.0, repetition_penalty=1.4e-45),
        SamplingParams(temperature=1.4e-45, repetition_penalty=1.4e-45, logprobs=2),
    ],
)
def test_tiny_temperatures_and_penalties_stay_in_the_vocabulary(params: SamplingParams) -> None:
    """What overflows FP32 must not become a token that does not exist."""
    state = SamplerState.create(params, [3], ())
    token = sample(torch.tensor([0.5, -1.0, 2.0, 1.0]), state)
    likely = 3 if params.repetition_penalty != 1.0 else 2
    assert token.id == likely
