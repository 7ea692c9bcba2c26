"""Embeddings come row by row through memory that is used again."""

from __future__ import annotations

import pytest
import torch

from headwater.gpu import embedding
from headwater.gpu.embedding import Embedding


@pytest.mark.parametrize("count", [1, 4, 5, 8, 23])
def test_every_row_is_its_tokens(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(embedding, "SLICE_ROWS", 4)
    table = torch.randn(50, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = Embedding(table, torch.device("cpu"))
    generator = torch.Generator().manual_seed(count)
    for _ in range(2):
        token_ids = torch.randint(50, (count,), generator=generator)
        found = rows.rows(token_ids)
        assert found.dtype == torch.float32
        assert torch.equal(found, table[token_ids].float())
