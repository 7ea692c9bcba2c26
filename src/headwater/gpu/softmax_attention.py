"""Causal softmax attention of one sequence by torch's fused kernels.

Owns which of them is used: the fastest by a short trial on this device, once per shape of heads.
Values narrower than keys, as MLA has them, are padded for kernels that cannot have that. Where
there are more keys than queries, the keys before the first query are attended to by all queries,
the others causally, and the two results are weighted by their sums of exponentials; a trial
compares that with torch's own way, and drops what is not the same.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Long enough for the kernels to outlast what starting them takes: with 4,096 tokens torch's own way
# behind a prefix seemed faster on an H200 than one that takes 40 % of its time at 65,536.
_TRIAL_TOKENS, _TRIAL_HEADS, _TRIALS = 16384, 8, 3
_COMPARED_TOKENS = 1024
_TOLERANCE = 1e-2
_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
_Choice = tuple[SDPBackend, bool]
_Attention = tuple[Tensor, Tensor]
"""Outputs [1, heads, n, v], and the logarithms of sums of exponentials, FP32 [1, heads, n]."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """FP16 [n, heads, d], [m, heads, d], [m, heads, v] -> [n, heads, v].

    The last query sees all m keys, the one before all but one, and so on. A CPU computes in FP32,
    so that how queries are cut changes nothing but the last bits of a sum.
    """
    if not queries.is_cuda:
        queries, keys, values = queries.float(), keys.float(), values.float()
    q, k, v = (t.transpose(0, 1)[None] for t in (queries, keys, values))
    if queries.shape[0] == 1:
        out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    elif queries.shape[0] == keys.shape[0]:
        out = _attend_square(q, k, v, scale)
    else:
        out = _attend_tail(q, k, v, scale)
    return out[0].transpose(0, 1)


def _attend_square(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if not q.is_cuda:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return _run(fastest(q.shape[-1], v.shape[-1], q.device), q, k, v, scale)


def _attend_tail(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if not q.is_cuda:
        return attend_in_two(_on_cpu, q, k, v, scale)
    return fastest_tail(q.shape[-1], v.shape[-1], q.device)(q, k, v, scale)


def attend_in_two(
    attention: Callable[[Tensor, Tensor, Tensor, bool, float], _Attention],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
) -> Tensor:
    """The last n of m positions, by an `attention` that knows whole and square causal ones.

    Exact: exp(a) / (exp(a) + exp(b)) of the first result and the rest of the second, with a and b
    the logarithms of their sums (Milakov and Gimelshein, arXiv 1805.02867).
    """
    count = q.shape[2]
    before, after = slice(0, k.shape[2] - count), slice(k.shape[2] - count, None)
    first, first_sums = attention(q, k[:, :, before], v[:, :, before], False, scale)
    second, second_sums = attention(q, k[:, :, after], v[:, :, after], True, scale)
    share = torch.sigmoid(first_sums - second_sums)[..., None]
    return torch.lerp(second.float(), first.float(), share).to(first.dtype)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> _Attention:
    width = v.shape[-1]
    padded = functional.pad(v, (0, q.shape[-1] - width))
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, padded, is_causal=is_causal, scale=scale
    )
    return out[..., :width], sums


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> _Attention:
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, sums.float().reshape(out.shape[:3])


def _by_flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> _Attention:
    width = v.shape[-1]
    padded = functional.pad(v, (0, q.shape[-1] - width))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, padded, is_causal=is_causal, scale=scale
    )
    return out[..., :width], sums


def _by_bias(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's own way, which is slow where its fastest kernels do not know it."""
    padded = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    bias = causal_lower_right(q.shape[2], k.shape[2])
    out = functional.scaled_dot_product_attention(q, k, padded, attn_mask=bias, scale=scale)
    return out[..., : v.shape[-1]]


def _run(choice: _Choice, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    backend, is_padded = choice
    width = v.shape[-1]
    if is_padded:
        v = functional.pad(v, (0, q.shape[-1] - width))
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out[..., :width]


@functools.cache
def fastest(key_dim: int, value_dim: int, device: torch.device) -> _Choice:
    """The backend, and whether values are padded for it, that took least time here."""
    seconds = trial_seconds(key_dim, value_dim, device)
    choice = min(seconds, key=lambda c: seconds[c])
    logger.info("attention with heads of %d and %d: %s", key_dim, value_dim, choice[0].name)
    return choice


@functools.cache
def fastest_tail(
    key_dim: int, value_dim: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """The fastest right way to attend from the last quarter of the positions."""
    compared, timed = (
        _tail_inputs(tokens, key_dim, value_dim, device)
        for tokens in (_COMPARED_TOKENS, _TRIAL_TOKENS)
    )
    ways: list[Callable[[Tensor, Tensor, Tensor, float], Tensor]] = [
        _by_bias,
        functools.partial(attend_in_two, _by_cudnn),
        functools.partial(attend_in_two, _by_flash),
    ]
    expected = _by_bias(*compared, 0.1).float()
    seconds = [float("inf")] * len(ways)
    for index, way in enumerate(ways):
        try:
            found = way(*compared, 0.1).float()
            if (found - expected).norm() < _TOLERANCE * expected.norm():
                seconds[index] = _time(functools.partial(way, *timed, 0.1), device)
        except (RuntimeError, TypeError) as refusal:
            # These functions are torch's own, and other versions may have others.
            logger.debug("attention behind a prefix: %s", refusal)
    names = "torch's bias", "two parts by cuDNN", "two parts by flash attention"
    best = seconds.index(min(seconds))
    trials = ", ".join(f"{n} {1e3 * s:.2f} ms" for n, s in zip(names, seconds, strict=True))
    logger.info("attention behind a prefix, heads of %d and %d: %s", key_dim, value_dim, trials)
    return ways[best]


def _tail_inputs(
    tokens: int, key_dim: int, value_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _trial_inputs(tokens, key_dim, value_dim, device)
    return q[:, :, -tokens // 4 :], k, v


def trial_seconds(key_dim: int, value_dim: int, device: torch.device) -> dict[_Choice, float]:
    """Seconds of a short causal attention by whatever backends can do it; math, if none can."""
    q, k, v = _trial_inputs(_TRIAL_TOKENS, key_dim, value_dim, device)
    found: dict[_Choice, float] = {}
    for backend in _BACKENDS:
        for is_padded in (False, True) if key_dim != value_dim else (False,):
            try:
                with warnings.catch_warnings():
                    # A backend that refuses is what is asked for; torch says why in warnings.
                    warnings.simplefilter("ignore")
                    run = functools.partial(_run, (backend, is_padded), q, k, v, 1.0)
                    found[backend, is_padded] = _time(run, device)
            except RuntimeError as refusal:
                logger.debug("%s, padded %s: %s", backend.name, is_padded, refusal)
    return found or {(SDPBackend.MATH, False): 0.0}


def _trial_inputs(tokens: int, key_dim: int, value_dim: int, device: torch.device) -> list[Tensor]:
    return [
        torch.randn(1, tokens, _TRIAL_HEADS, d, device=device).half().transpose(1, 2)
        for d in (key_dim, key_dim, value_dim)
    ]


def _time(run: Callable[[], Tensor], device: torch.device) -> float:
    run()
    torch.cuda.synchronize(device)
    began_at = time.perf_counter()
    for _ in range(_TRIALS):
        run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began_at
