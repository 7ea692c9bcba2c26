"""Rests between copies: how long they are, and the kernel for real cards."""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.gpu import pacing
from headwater.gpu.pacing import Pacer


class _Event:
    """A CUDA event of a queue on which a byte takes a nanosecond."""

    queue_seconds = 0.0

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = _Event.queue_seconds

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(pacing, "rest", found.append)
    monkeypatch.setattr(_Event, "queue_seconds", 0.0)
    return found


def _copy(pacer: Pacer, num_bytes: int, share: float) -> None:
    pacer.before()
    _Event.queue_seconds += num_bytes * 1e-9
    pacer.after(num_bytes, share)


def test_a_rest_is_what_the_share_leaves_to_others(rests: list[float]) -> None:
    pacer = Pacer(stream=None)
    _copy(pacer, 1000, 0.5)
    assert rests == [], "it is not known yet what copies take"
    for share in (1.0, 0.5, 0.25):
        _copy(pacer, 2000, share)
    assert rests == pytest.approx([2000e-9, 6000e-9])
    assert pacer.seconds_per_byte == pytest.approx(1e-9)


def test_the_kernel_compiles_for_real_cards() -> None:
    triton: Any = pytest.importorskip("triton", reason="pip install triton==3.6.0")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headwater.gpu.kernels.rest import rest_kernel

    for capability in (86, 90, 120):
        source = ASTSource(fn=rest_kernel, signature={"nanoseconds": "i32"}, constexprs={})
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": 1})
        assert compiled.asm["ptx"].count("%globaltimer") == 2
