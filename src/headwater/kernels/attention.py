"""Paged attention and FP32 products on their own, as tests and benchmarks call them.

Models run the same kernels from native code: see headwater.kernels.model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater import _native
from headwater._native import Mode
from headwater.errors import InternalError
from headwater.kernels.checks import check_layout, check_tensor
from headwater.kernels.matrix import Matrix
from headwater.kernels.pool import WorkerPool
from headwater.kv.pages import ENTRY_DTYPE
from headwater.model.batch import Batch

_GQA_DIMENSIONS = 5


def native_batch(batch: Batch, block_tokens: int, num_blocks: int) -> _native.TokenBatch:
    """The spans of `batch`, which must outlive the result, over a pool of `num_blocks`."""
    spans = [
        (s.first_row, s.num_new, s.start, s.block_ids.data_ptr(), s.block_ids.numel())
        for s in batch.spans
    ]
    return _native.TokenBatch(spans, block_tokens, num_blocks)


def paged_attention(
    pool: WorkerPool,
    batch: Batch,
    pages: Tensor,
    queries: Tensor,
    *,
    value_dim: int | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    isa: str | None = None,
) -> Tensor:
    """What the batch's queries attend to, FP32 [T, heads, value_dim]; keys must be in the pages.

    `queries` are FP32 [T, heads, key_dim], times the softmax scale. `pages` are one layer's, in
    FP16: [blocks, 2, block_tokens, kv_heads, key_dim] for GQA; for MLA [blocks, block_tokens,
    key_dim], where values are the first `value_dim` elements of an entry. A query sees the last
    `window` tokens, itself among them, or all where that is 0. `sinks`, FP32 [heads], are scores
    that take part in the softmax without a value. Raises InternalError on tensors that do not fit.
    """
    num_tokens, num_heads, key_dim = queries.shape
    check_tensor("queries", queries, torch.float32, (batch.token_ids.numel(), num_heads, key_dim))
    check_layout("pages", pages)
    if pages.dtype != ENTRY_DTYPE or pages.shape[-1] != key_dim:
        raise InternalError(f"pages: expected FP16 [..., {key_dim}], got {list(pages.shape)}")
    if sinks is not None:
        check_tensor("sinks", sinks, torch.float32, (num_heads,))
    is_gqa = pages.dim() == _GQA_DIMENSIONS
    num_kv_heads = pages.shape[3] if is_gqa else 1
    block_tokens = pages.shape[2] if is_gqa else pages.shape[1]
    token_stride = num_kv_heads * key_dim
    value_dim = key_dim if value_dim is None else value_dim
    out = torch.empty(num_tokens, num_heads, value_dim)
    _native.paged_attention(
        compute=_native.Compute(pool.native, isa or "", Mode.DECODE),
        batch=native_batch(batch, block_tokens, pages.shape[0]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_stride=pages[0].numel(),
        token_stride=token_stride,
        head_stride=key_dim if is_gqa else 0,
        value_offset=block_tokens * token_stride if is_gqa else 0,
        window=window,
        sinks=0 if sinks is None else sinks.data_ptr(),
        pages=pages.data_ptr(),
        queries=queries.data_ptr(),
        outputs=out.data_ptr(),
    )
    return out


def multiply_floats(
    pool: WorkerPool,
    matrix: Matrix | Tensor,
    rows: range,
    x: Tensor,
    *,
    is_transposed: bool = False,
    isa: str | None = None,
) -> Tensor:
    """x times the transposed `rows` of a matrix, or times the rows themselves, all in FP32.

    `matrix` is FP32 [N, K] or in a stored format. FP32 [T, K] -> [T, len(rows)]; transposed
    [T, len(rows)] -> [T, K]. Raises InternalError on tensors that do not fit.
    """
    num_rows, columns = (
        matrix.shape if isinstance(matrix, Tensor) else (matrix.rows, matrix.columns)
    )
    if not 0 <= rows.start < rows.stop <= num_rows or rows.step != 1:
        raise InternalError(f"rows: expected some of {num_rows}, got {rows}")
    if isinstance(matrix, Tensor):
        check_tensor("matrix", matrix, torch.float32, (num_rows, columns))
        native = _native.FloatMatrix.floats(num_rows, columns, matrix.data_ptr())
    else:
        native = _native.FloatMatrix.stored(matrix.native)
    input_size, output_size = columns, len(rows)
    if is_transposed:
        input_size, output_size = output_size, input_size
    check_tensor("x", x, torch.float32, (x.shape[0], input_size))
    out = torch.empty(x.shape[0], output_size)
    _native.multiply_floats(
        compute=_native.Compute(pool.native, isa or "", Mode.DECODE),
        matrix=native,
        row_begin=rows.start,
        row_end=rows.stop,
        is_transposed=is_transposed,
        inputs=x.data_ptr(),
        outputs=out.data_ptr(),
        num_tokens=x.shape[0],
    )
    return out
