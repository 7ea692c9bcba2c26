"""Products with FP32 activations: every format and instruction set against FP64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwater.errors import InternalError
from headwater.kernels import Matrix, WorkerPool, supported_isas
from headwater.kernels.attention import multiply_floats
from tests.native.samples import FORMATS, Sample, relative_error, seeded, unaligned

ISAS = supported_isas()


def _make(
    name: str, rng: torch.Generator, rows: int, columns: int
) -> tuple[Matrix | Tensor, Tensor]:
    """A matrix and its values in FP64."""
    if name == "f32":
        weight = unaligned(torch.randn(rows, columns, generator=rng), 1)
        return weight, weight.double()
    make: Callable[..., Sample] = FORMATS[name]
    sample = make(rng, rows, columns)
    return sample.matrix, sample.values


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(1)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", ["f32", *FORMATS])
@pytest.mark.parametrize("isa", ISAS)
def test_any_rows_and_tokens(
    request: pytest.FixtureRequest, pool: WorkerPool, isa: str, name: str, is_transposed: bool
) -> None:
    rng, choose = seeded(request)
    for _ in range(4):
        rows = choose.randint(1, 300)
        matrix, values = _make(name, rng, rows, choose.choice([1, 15, 64, 130, 200, 512]))
        first = choose.randrange(rows)
        part = range(first, choose.randint(first + 1, rows))
        used = values[part.start : part.stop]
        weights = used if is_transposed else used.t()
        x = unaligned(torch.randn(choose.randint(1, 9), weights.shape[0], generator=rng), 1)
        got = multiply_floats(pool, matrix, part, x, is_transposed=is_transposed, isa=isa)
        # Scalar sums are FP32 too, one after the other.
        assert relative_error(got, x.double() @ weights) < 3e-6
        row = choose.randrange(len(x))
        alone = multiply_floats(
            pool, matrix, part, x[row : row + 1].clone(), is_transposed=is_transposed, isa=isa
        )
        assert torch.equal(alone[0], got[row])


def test_refuses_rows_that_are_not_there(pool: WorkerPool) -> None:
    with pytest.raises(InternalError, match="rows: expected some of 4, got"):
        multiply_floats(pool, torch.zeros(4, 8), range(2, 5), torch.zeros(1, 8))
