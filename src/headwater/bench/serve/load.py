"""What a benchmark sends: requests of drawn lengths, and when each of them is to be sent.

Prompts are random tokens, so that no two of them share a beginning unless that is asked for.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Tokens that one hash id of a trace stands for; see read_trace.
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request; `prompt` is token ids, or what a user says in a chat.

    `at_seconds` is when to send it, counted from the start; None: when its predecessor has ended.
    """

    label: str
    prompt: tuple[int, ...] | str
    max_tokens: int
    at_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Requests of one kind: both lengths are drawn evenly from [low, high], in tokens."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> LengthMix:
        """Reads PROMPT:OUTPUT[:WEIGHT], each length a number or LOW-HIGH. Raises ConfigError."""
        parts = text.split(":")
        try:
            if len(parts) not in (2, 3):
                raise ValueError
            weight = float(parts[2]) if len(parts) == 3 else 1.0
            mix = cls(_span(parts[0]), _span(parts[1]), weight)
        except ValueError:
            mix = None
        if mix is None or mix.weight <= 0:
            raise ConfigError(
                f"--mix {text}: expected PROMPT:OUTPUT[:WEIGHT] with lengths such as 128 or "
                "100-200, of at least 1, and a weight above 0"
            )
        return mix


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise ValueError(text)
    return span


def draw_requests(
    mixes: Sequence[LengthMix],
    count: int,
    *,
    vocab_size: int,
    max_context_tokens: int,
    shared_tokens: int = 0,
    seed: int = 0,
) -> list[LoadRequest]:
    """`count` requests whose prompts begin with the same `shared_tokens` tokens.

    Raises ConfigError when a drawn request could not fit into the model's context.
    """
    draw = random.Random(seed)
    shared = tuple(draw.randrange(vocab_size) for _ in range(shared_tokens))
    requests = []
    weights = [mix.weight for mix in mixes]
    for _ in range(count):
        mix = draw.choices(mixes, weights)[0]
        length, answer = draw.randint(*mix.prompt_tokens), draw.randint(*mix.output_tokens)
        if length + answer > max_context_tokens:
            raise ConfigError(
                f"--mix: {length} prompt tokens and {answer} new ones exceed the model's context "
                f"of {max_context_tokens}; give shorter lengths"
            )
        own = (draw.randrange(vocab_size) for _ in range(max(0, length - shared_tokens)))
        prompt = (*shared[:length], *own)
        requests.append(
            LoadRequest(f"{_text(mix.prompt_tokens)}:{_text(mix.output_tokens)}", prompt, answer)
        )
    return requests


def _text(span: tuple[int, int]) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds, without end: independent arrivals, `rate` per second on average."""
    draw = random.Random(seed)
    now = 0.0
    while True:
        now += draw.expovariate(rate)
        yield now


def read_trace(
    path: Path, *, vocab_size: int, max_context_tokens: int, speed: float = 1.0
) -> tuple[list[LoadRequest], int]:
    """Requests of a trace file in time order, and how many were cut to fit the model's context.

    The file holds one JSON object a line, in the form of the traces that Mooncake published
    (github.com/kvcache-ai/Mooncake, FAST'25 release): `timestamp` in milliseconds, `input_length`
    and `output_length` in tokens, and, if there, `hash_ids`, which name the prompt's blocks of 512
    tokens: requests share a block's tokens when they share its id. `speed` divides the times.

    Raises ConfigError, naming the line, when the file does not look like that.
    """
    requests = []
    num_cut = 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at = float(entry["timestamp"]) / 1000 / speed
            length, answer = int(entry["input_length"]), int(entry["output_length"])
            hash_ids = [int(name) for name in entry.get("hash_ids", ())]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--trace {path}, line {number}: expected a JSON object with the numbers "
                f"timestamp, input_length and output_length, got {error!r}"
            ) from error
        room = max_context_tokens - 1
        num_cut += length + answer > max_context_tokens
        length = min(max(1, length), room)
        answer = min(max(1, answer), max_context_tokens - length)
        prompt = _trace_prompt(length, hash_ids, number, vocab_size)
        requests.append(LoadRequest("trace", prompt, answer, at))
    if not requests:
        raise ConfigError(f"--trace {path}: holds no request")
    return sorted(requests, key=lambda request: request.at_seconds or 0.0), num_cut


def _trace_prompt(
    length: int, hash_ids: Sequence[int], number: int, vocab_size: int
) -> tuple[int, ...]:
    tokens: list[int] = []
    for name in hash_ids:
        if len(tokens) >= length:
            break
        tokens += _random_tokens(f"block {name}", TRACE_BLOCK_TOKENS, vocab_size)
    tokens += _random_tokens(f"line {number}", max(0, length - len(tokens)), vocab_size)
    return tuple(tokens[:length])


def _random_tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]
