"""Logits behind a step, and logits of other states, on a CPU with graphs that are played."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from headwater.gpu.decode_head import DecodeHead
from headwater.gpu.resident import Norm, ResidentMatrix
from tests.gpu.samples import relative_error

ROWS, HIDDEN, VOCABULARY = 3, 32, 50


def _head() -> tuple[DecodeHead, torch.Tensor]:
    matrix = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = Norm(torch.ones(HIDDEN), 1e-6)
    resident = ResidentMatrix({"it": matrix}, "it")
    return DecodeHead(norm, resident, ROWS, HIDDEN, VOCABULARY, torch.device("cpu")), matrix


def _expected(hidden: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return Norm(torch.ones(HIDDEN), 1e-6)(hidden) @ matrix.float().t()


def test_logits_that_were_queued_are_found_and_others_are_computed() -> None:
    head, matrix = _head()
    replays = []

    def replay() -> None:
        replays.append(2)
        head._compute(2)

    head._graphs[2] = SimpleNamespace(replay=replay)
    first, second = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    head.follow(first)
    assert replays == [2]
    assert relative_error(head(first), _expected(first, matrix)) < 1e-2
    # An equal tensor is another one, which may have changed.
    assert relative_error(head(second), _expected(second, matrix)) < 1e-2
    assert relative_error(head(first), _expected(first, matrix)) < 1e-2


def test_nothing_is_queued_for_a_number_of_rows_that_was_never_asked_for() -> None:
    head, matrix = _head()
    hidden = torch.randn(3, HIDDEN)
    head.follow(hidden)
    assert relative_error(head(hidden), _expected(hidden, matrix)) < 1e-2
    head.follow(None)
    hidden += 1
    assert relative_error(head(hidden), _expected(hidden, matrix)) < 1e-2
