"""Attention of single tokens over keys and values that lie on the device, row by row of a cache.

Owns the cache's shape and what is computed over it; all shapes are fixed but the number of tokens
and a bound on the context, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu.resident import ResidentMatrix
from headwater.model.layer_spec import GqaSpec, MlaSpec
from headwater.model.rope import RotaryTable, rope_frequencies

if TYPE_CHECKING:
    from headwater.gpu.resident import Norm, ResidentWeights
    from headwater.model.layer_spec import RopeSpec


class Angles:
    """Cosines and sines of all positions of one rotary embedding, on the device."""

    def __init__(self, spec: RopeSpec, max_context: int, device: torch.device) -> None:
        angles = torch.arange(max_context, dtype=torch.float32)[:, None, None]
        angles = angles * rope_frequencies(spec)
        self.cos = (angles.cos() * spec.amplitude).to(device)
        self.sin = (angles.sin() * spec.amplitude).to(device)
        self._table = RotaryTable(spec)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates FP32 x [T, heads, dim] for int64 positions [T]."""
        return self._table.rotate(x, self.cos[positions], self.sin[positions])


class MlaDecode:
    """Multi-head latent attention in its absorbed form; see headwater.model.mla."""

    def __init__(self, spec: MlaSpec, weights: ResidentWeights, angles: Angles) -> None:
        self._spec = spec
        self._angles = angles
        self.entry_shape = (spec.kv_lora_rank + spec.rope_dim,)
        self._inputs, self._kv_a_norm = weights.matrix("kv_a"), weights.norm("kv_a_norm")
        self._q_a_norm: Norm | None = None
        if spec.q_lora_rank is None:
            self._q = weights.matrix("q")
        else:
            self._q, self._q_a_norm = weights.matrix("q_b"), weights.norm("q_a_norm")
            self._inputs = ResidentMatrix.joined([weights.matrix("q_a"), self._inputs])
        per_head = weights.matrix("kv_b").whole().view(spec.num_heads, -1, spec.kv_lora_rank)
        self._keys = per_head[:, : spec.nope_dim].contiguous()
        self._values = per_head[:, spec.nope_dim :].transpose(1, 2).contiguous()
        self._o = weights.matrix("o")

    def __call__(self, x: Tensor, positions: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        """BF16 [T, hidden] -> FP32 [pieces, T, hidden], to be added up.

        `cache`, BF16 [T, context, rank + rope], gets the new entries at int64 `positions` [T];
        `mask`, FP32 [T, 1, bound], is added to the scores.
        """
        if x.is_cuda:
            return self._fused(x, positions, cache, mask.shape[-1])
        spec, rank = self._spec, self._spec.kv_lora_rank
        inputs = self._inputs.product(x)
        low, latent, k_rope = inputs.split([spec.q_lora_rank or 0, rank, spec.rope_dim], dim=-1)
        compressed = x if self._q_a_norm is None else self._q_a_norm(low).bfloat16()
        q = self._q.product(compressed).view(x.shape[0], spec.num_heads, -1)
        k_rope = self._angles.rotate(k_rope[:, None], positions)[:, 0]
        entries = torch.cat((self._kv_a_norm(latent), k_rope), dim=-1).bfloat16()
        cache[torch.arange(x.shape[0], device=x.device), positions] = entries

        q_nope = q[..., : spec.nope_dim].transpose(0, 1).bfloat16()
        absorbed = _products(q_nope, self._keys).transpose(0, 1)
        q_rope = self._angles.rotate(q[..., spec.nope_dim :], positions)
        queries = (torch.cat((absorbed, q_rope), dim=-1) * spec.softmax_scale).bfloat16()
        seen = cache[:, : mask.shape[-1]]
        shares = (_products(queries, seen.transpose(1, 2)) + mask).softmax(dim=-1).bfloat16()
        latents = _products(shares, seen[..., :rank]).transpose(0, 1).bfloat16()
        out = _products(latents, self._values).transpose(0, 1)
        return self._o.pieces(out.flatten(1).bfloat16())

    def _fused(self, x: Tensor, positions: Tensor, cache: Tensor, bound: int) -> Tensor:
        """The same in few kernels."""
        from headwater.gpu.kernels.decode_steps import masked_softmax, mla_inputs, mla_queries

        spec, rank, norm = self._spec, self._spec.kv_lora_rank, self._q_a_norm
        angles = self._angles.cos, self._angles.sin
        norms = None if norm is None else norm.weight, self._kv_a_norm.weight
        pieces = self._inputs.pieces(x)
        eps = self._kv_a_norm.eps
        low = mla_inputs(spec, pieces, norms, angles, positions, cache, eps)
        pieces = self._q.pieces(x if norm is None else low)
        plain, queries = mla_queries(spec, pieces, angles, positions)
        queries[..., :rank].transpose(0, 1).copy_(torch.bmm(plain, self._keys))
        seen = cache[:, :bound]
        shares = masked_softmax(_products(queries, seen.transpose(1, 2)), positions)
        latents = torch.bmm(shares, seen[..., :rank]).transpose(0, 1)
        out = torch.bmm(latents, self._values).transpose(0, 1)
        return self._o.pieces(out.flatten(1))


class GqaDecode:
    """Grouped-query attention; see headwater.model.gqa."""

    def __init__(self, spec: GqaSpec, weights: ResidentWeights, angles: Angles) -> None:
        self._spec = spec
        self._angles = angles
        self.entry_shape = (2, spec.num_kv_heads, spec.head_dim)
        self._q, self._k, self._v, self._o = (weights.matrix(name) for name in "qkvo")
        self._norms = None
        if spec.has_qk_norm:
            self._norms = weights.norm("q_norm"), weights.norm("k_norm")

    def __call__(self, x: Tensor, positions: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        """As MlaDecode, over a cache [T, context, 2, kv heads, head_dim]."""
        spec, count = self._spec, x.shape[0]
        q, k, v = (
            matrix.product(x).view(count, -1, spec.head_dim)
            for matrix in (self._q, self._k, self._v)
        )
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        q, k = self._angles.rotate(q, positions), self._angles.rotate(k, positions)
        entries = torch.stack((k, v), dim=1).bfloat16()
        cache[torch.arange(count, device=x.device), positions] = entries

        seen = cache[:, : mask.shape[-1]].permute(0, 2, 3, 1, 4)
        keys, values = (seen[:, i].reshape(-1, mask.shape[-1], spec.head_dim) for i in (0, 1))
        queries = (q * spec.softmax_scale).bfloat16()
        queries = queries.view(count * spec.num_kv_heads, -1, spec.head_dim)
        scores = _products(queries, keys.transpose(1, 2)).view(count, -1, mask.shape[-1])
        shares = (scores + mask).softmax(dim=-1).bfloat16()
        out = _products(shares.view(*queries.shape[:2], -1), values)
        return self._o.pieces(out.view(count, -1).bfloat16())


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Products of stacks of BF16 matrices, in FP32."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
