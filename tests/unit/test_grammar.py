"""Structured output: random logits, and yet every answer conforms."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer

from headwater.errors import InvalidRequestError
from headwater.generation import Constraint, SamplingParams
from headwater.services.decode.grammar import GrammarCompiler
from headwater.services.decode.sampler import SamplerState, sample
from tests.tiny_model import VOCAB

if TYPE_CHECKING:
    from pathlib import Path

EOS = (256,)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "size": {"enum": ["small", "large"]},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "size", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB, EOS)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def generate(
    compiler: GrammarCompiler, constraint: Constraint, seed: int, output: tuple[int, ...] = ()
) -> list[int]:
    """Tokens drawn from random logits, until the end of the sequence or of the grammar."""
    params = SamplingParams(seed=seed, constraint=constraint)
    grammar = compiler.compile(constraint, output)
    state = SamplerState.create(params, (), EOS, output, grammar)
    tokens = list(output)
    while len(tokens) < 400 and not grammar.is_complete:
        scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed + len(tokens)))
        token = sample(scores, state).id
        if token in EOS:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", range(5))
def test_json_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    answer = json.loads(
        tokenizer.decode(generate(compiler, Constraint("json_schema", SCHEMA), seed))
    )
    assert set(answer) == {"name", "size", "ok"}
    assert len(answer["name"]) <= 5
    assert answer["size"] in ("small", "large")
    assert isinstance(answer["ok"], bool)


def test_regex(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    pattern = r"[a-f]{3}-[0-9]{4}"
    for seed in range(5):
        text = tokenizer.decode(generate(compiler, Constraint("regex", pattern), seed))
        assert re.fullmatch(pattern, text)


def test_choice(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = ["yes", "no", "perhaps"]
    texts = {
        tokenizer.decode(generate(compiler, Constraint("choice", json.dumps(choices)), seed))
        for seed in range(20)
    }
    assert texts <= set(choices)
    assert len(texts) > 1


@pytest.mark.parametrize(
    "grammar", ['start: "<" /[xy]{2,4}/ ">"', 'root ::= "<" [xy] [xy] ">"'], ids=["lark", "gbnf"]
)
def test_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str) -> None:
    text = tokenizer.decode(generate(compiler, Constraint("grammar", grammar), 1))
    assert re.fullmatch(r"<[xy]{2,4}>", text)


def test_an_answer_can_be_gone_on_with(compiler: GrammarCompiler) -> None:
    constraint = Constraint("json_schema", SCHEMA)
    whole = generate(compiler, constraint, 3)
    for cut in (1, 10, len(whole) - 1):
        assert generate(compiler, constraint, 3, tuple(whole[:cut])) == whole


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", "{"),
        Constraint("json_schema", '{"type": "nonsense"}'),
        Constraint("regex", "a("),
        Constraint("grammar", "start: unknown_rule"),
    ],
    ids=lambda constraint: f"{constraint.kind} {constraint.text}",
)
def test_what_is_not_well_formed_is_refused(
    compiler: GrammarCompiler, constraint: Constraint
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(constraint)
    assert caught.value.field == "sampling.constraint"
    assert constraint.kind in caught.value.problem


def test_output_that_breaks_the_constraint_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="do not fit"):
        compiler.compile(Constraint("regex", "a+"), [ord("b") - 33])


@pytest.mark.parametrize("text", ['"no list"', "[]", "[1]", "[", ""])
def test_a_choice_is_a_list_of_strings(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="choice: must be a JSON array"):
        Constraint("choice", text)
