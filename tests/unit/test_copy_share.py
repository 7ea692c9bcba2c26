"""Copies leave decode its pace, as measured against steps beside which nothing is copied."""

from __future__ import annotations

import pytest

from headwater.services.prefill import copy_share as copy_share_module
from headwater.services.prefill.copy_share import CopyShare, Reading

STEP_SECONDS = 0.19


class _Decode:
    """Steps take `slowdown` longer beside copies all of the time, and less so with less of them."""

    def __init__(self, share: CopyShare, slowdown: float) -> None:
        self._share = share
        self._slowdown = slowdown
        self.now = 50.0
        self.steps, self._busy = 0, 0.0
        self.step_seconds = STEP_SECONDS

    def monotonic(self) -> float:
        return self.now

    def run(
        self, seconds: float, *, is_copying: bool, running: int = 1, is_mixed: bool = False
    ) -> None:
        """A reading after each step."""
        end = self.now + seconds
        while self.now < end:
            alone = self.step_seconds * running * (3.0 if is_mixed else 1.0)
            taken = alone * (1 + self._slowdown * self._share.share * is_copying)
            self.now += taken
            self.steps += 1
            self._busy += taken
            reading = Reading(running, self.steps, self._busy, is_copying, is_mixed)
            self._share.observe(reading)


def _decode(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, setting: float = 0.0
) -> tuple[CopyShare, _Decode]:
    share = CopyShare(setting)
    decode = _Decode(share, slowdown)
    monkeypatch.setattr(copy_share_module, "time", decode)
    return share, decode


@pytest.mark.parametrize(("slowdown", "expected"), [(0.05, 1.0), (0.28, 0.43), (0.5, 0.24)])
def test_the_share_keeps_steps_within_what_is_promised(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, expected: float
) -> None:
    share, decode = _decode(monkeypatch, slowdown)
    decode.run(5, is_copying=False)
    assert share.share == 1.0
    decode.run(25, is_copying=True)
    assert share.share == pytest.approx(expected, abs=0.02)
    # It is known when the next prompt comes, and more of what there is does not change it.
    decode.run(5, is_copying=False)
    decode.run(12, is_copying=True)
    assert share.share == pytest.approx(expected, abs=0.02)


def test_what_cannot_be_compared_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    share, decode = _decode(monkeypatch, 0.5)
    decode.run(20, is_copying=True)
    assert share.share == 1.0, "nobody knows what an undisturbed step takes"
    decode.run(5, is_copying=False)
    decode.run(10, is_copying=True, running=2)
    assert share.share == 1.0, "of two requests"
    decode.run(10, is_copying=True, is_mixed=True)
    assert share.share == 1.0, "with prompt tokens in it"
    decode.now += 200.0
    decode.run(10, is_copying=True)
    assert share.share == 1.0, "any more"


def test_it_never_starves_prompts_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    share, decode = _decode(monkeypatch, 0.7)
    decode.run(5, is_copying=False)
    decode.run(60, is_copying=True)
    assert share.share == 0.2
    decode._slowdown = 0.05
    decode.run(60, is_copying=True)
    assert share.share == 1.0


def test_another_decode_process_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    share, decode = _decode(monkeypatch, 0.28)
    decode.run(5, is_copying=False)
    decode.run(60, is_copying=True)
    assert share.share == pytest.approx(0.43, abs=0.02)
    decode.steps = 0
    decode._slowdown = 0.05
    decode.run(30, is_copying=True)
    assert share.share == 1.0


def test_a_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    share, decode = _decode(monkeypatch, 5.0, setting=0.7)
    decode.run(5, is_copying=False)
    decode.run(20, is_copying=True)
    assert share.share == 0.7
