"""Attention in two parts against the plain formula."""

from __future__ import annotations

import pytest
import torch

from headwater.gpu.softmax_attention import attend
from tests.gpu.samples import relative_error


@pytest.mark.parametrize(("count", "num_keys"), [(1, 1), (1, 9), (7, 7), (2, 9), (8, 9), (30, 100)])
@pytest.mark.parametrize("value_dim", [24, 16])
def test_the_last_query_sees_all_and_the_others_less(
    count: int, num_keys: int, value_dim: int
) -> None:
    generator = torch.Generator().manual_seed(count + num_keys)
    q, k, v = (
        torch.randn(n, 3, d, generator=generator).half()
        for n, d in ((count, 24), (num_keys, 24), (num_keys, value_dim))
    )
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * 0.3
    hidden = torch.ones(count, num_keys, dtype=torch.bool).triu_(num_keys - count + 1)
    shares = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    expected = torch.einsum("hnm,mhv->nhv", shares, v.double())
    out = attend(q, k, v, 0.3)
    assert out.shape == expected.shape
    assert relative_error(out, expected) < 1e-6
