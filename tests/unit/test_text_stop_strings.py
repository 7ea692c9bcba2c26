"""Stop strings: found across pieces, held back no more than needed."""

from __future__ import annotations

import random

import pytest

from headwater.services.router.text.stop_strings import StopStrings


def _feed(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        result = stops.push(piece)
        shown += result.text
        if result.matched is not None:
            return shown, result.matched
    return shown + stops.flush(), None


def _expected(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The definition, slowly: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            matched = max(ending, key=len)
            return (text[:end] if include_stop else text[: end - len(matched)]), matched
    return text, None


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_any_cut_gives_what_the_whole_text_gives(seed: int, include_stop: bool) -> None:
    random_source = random.Random(seed)
    alphabet = "ab" if seed % 2 else "ab😀é"
    stops = [
        "".join(random_source.choices(alphabet, k=random_source.randrange(1, 6)))
        for _ in range(random_source.randrange(1, 4))
    ]
    text = "".join(random_source.choices(alphabet, k=40))
    pieces = []
    rest = text
    while rest:
        size = random_source.randrange(0, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    got = _feed(StopStrings(stops, include_stop=include_stop), pieces)
    assert got == _expected(text, stops, include_stop=include_stop)


def test_only_what_may_be_a_stop_string_is_held() -> None:
    stops = StopStrings(["\n\nHuman:"])
    assert stops.push("Hello\n").text == "Hello"
    assert stops.push("\nHu").text == ""
    assert stops.push("mid").text == "\n\nHumid"
    assert stops.push("\n").text == ""
    assert stops.flush() == "\n"
    assert stops.flush() == ""


def test_overlapping_beginnings() -> None:
    stops = StopStrings(["aab"])
    assert stops.push("aaa").text == "a"
    result = stops.push("b")
    assert (result.text, result.matched) == ("", "aab")


def test_the_first_complete_stop_string_wins_and_the_longest_of_several() -> None:
    assert _feed(StopStrings(["abcd", "bc"]), ["xabcd"]) == ("xa", "bc")
    assert _feed(StopStrings(["c", "abc"]), ["xabc"]) == ("x", "abc")


def test_without_stop_strings_text_goes_straight_through() -> None:
    stops = StopStrings([])
    assert stops.push("anything").text == "anything"
    assert stops.flush() == ""
