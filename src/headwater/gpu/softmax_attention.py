"""Causal softmax attention of one sequence by torch's fused kernels.

Owns which of them is used: the fastest by a short trial on this device, once per shape of heads.
Values narrower than keys, as MLA has them, are padded for kernels that cannot have that.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

logger = logging.getLogger(__name__)

_TRIAL_TOKENS, _TRIAL_HEADS, _TRIALS = 4096, 8, 3
_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
_Choice = tuple[SDPBackend, bool]


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """FP16 [n, heads, d], [m, heads, d], [m, heads, v] -> [n, heads, v].

    The last query sees all m keys, the one before all but one, and so on. A CPU computes in FP32,
    so that how queries are cut changes nothing but the last bits of a sum.
    """
    if not queries.is_cuda:
        queries, keys, values = queries.float(), keys.float(), values.float()
    num_queries, num_keys = queries.shape[0], keys.shape[0]
    q, k, v = (t.transpose(0, 1)[None] for t in (queries, keys, values))
    if num_queries == 1:
        out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    elif num_queries == num_keys:
        out = _attend_all(q, k, v, scale)
    else:
        padded = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
        bias = causal_lower_right(num_queries, num_keys)
        out = functional.scaled_dot_product_attention(q, k, padded, attn_mask=bias, scale=scale)
    return out[0, ..., : values.shape[-1]].transpose(0, 1)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if not q.is_cuda:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return _run(fastest(q.shape[-1], v.shape[-1], q.device), q, k, v, scale)


def _run(choice: _Choice, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    backend, is_padded = choice
    if is_padded:
        v = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@functools.cache
def fastest(key_dim: int, value_dim: int, device: torch.device) -> _Choice:
    """The backend, and whether values are padded for it, that took least time here."""
    seconds = trial_seconds(key_dim, value_dim, device)
    choice = min(seconds, key=lambda c: seconds[c])
    logger.info("attention with heads of %d and %d: %s", key_dim, value_dim, choice[0].name)
    return choice


def trial_seconds(key_dim: int, value_dim: int, device: torch.device) -> dict[_Choice, float]:
    """Seconds of a short causal attention by whatever backends can do it; math, if none can."""
    q, k, v = (
        torch.randn(1, _TRIAL_TOKENS, _TRIAL_HEADS, d, device=device).half().transpose(1, 2)
        for d in (key_dim, key_dim, value_dim)
    )
    found: dict[_Choice, float] = {}
    for backend in _BACKENDS:
        for is_padded in (False, True) if key_dim != value_dim else (False,):
            try:
                with warnings.catch_warnings():
                    # A backend that refuses is what is asked for; torch says why in warnings.
                    warnings.simplefilter("ignore")
                    found[backend, is_padded] = _time((backend, is_padded), q, k, v)
            except RuntimeError as refusal:
                logger.debug("%s, padded %s: %s", backend.name, is_padded, refusal)
    return found or {(SDPBackend.MATH, False): 0.0}


def _time(choice: _Choice, q: Tensor, k: Tensor, v: Tensor) -> float:
    _run(choice, q, k, v, 1.0)
    torch.cuda.synchronize(q.device)
    began_at = time.perf_counter()
    for _ in range(_TRIALS):
        _run(choice, q, k, v, 1.0)
    torch.cuda.synchronize(q.device)
    return time.perf_counter() - began_at
