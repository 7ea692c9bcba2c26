"""Attention of single tokens over keys and values that lie on the device, row by row of a cache.

Owns the cache's shape and what is computed over it; all shapes are fixed but the number of tokens
and a bound on the context, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.gpu.cached_attention import attended, cache_shape
from headwater.gpu.precision import for_cache, rounded
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
        self._shape = cache_shape(spec)
        self.entry_shape = self._shape.entry
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

    def __call__(self, x: Tensor, positions: Tensor, cache: Tensor, bound: int) -> Tensor:
        """FP16 [T, hidden] -> FP32 [pieces, T, hidden], to be added up.

        `cache`, FP16 [T, context, rank + rope], gets the new entries at int64 `positions` [T], all
        below `bound`.
        """
        if x.is_cuda:
            return self._fused(x, positions, cache, bound)
        spec, rank = self._spec, self._spec.kv_lora_rank
        inputs = self._inputs.product(x)
        low, latent, k_rope = inputs.split([spec.q_lora_rank or 0, rank, spec.rope_dim], dim=-1)
        compressed = x if self._q_a_norm is None else rounded(self._q_a_norm(low))
        q = self._q.product(compressed).view(x.shape[0], spec.num_heads, -1)
        k_rope = self._angles.rotate(k_rope[:, None], positions)[:, 0]
        entries = for_cache(torch.cat((self._kv_a_norm(latent), k_rope), dim=-1))
        cache[torch.arange(x.shape[0]), positions] = entries

        absorbed = torch.bmm(q[..., : spec.nope_dim].transpose(0, 1), self._keys.float())
        q_rope = self._angles.rotate(q[..., spec.nope_dim :], positions)
        queries = torch.cat((absorbed.transpose(0, 1), q_rope), dim=-1) * spec.softmax_scale
        latents = attended(queries, cache[:, :bound], positions, self._shape)
        out = torch.bmm(latents.transpose(0, 1), self._values.float()).transpose(0, 1)
        return self._o.pieces(rounded(out.flatten(1)))

    def _fused(self, x: Tensor, positions: Tensor, cache: Tensor, bound: int) -> Tensor:
        """The same in few kernels."""
        from headwater.gpu.kernels.attend import attend
        from headwater.gpu.kernels.decode_steps import mla_inputs, mla_queries, mla_values

        spec, norm = self._spec, self._q_a_norm
        angles = self._angles.cos, self._angles.sin
        norms = None if norm is None else norm.weight, self._kv_a_norm.weight
        pieces = self._inputs.pieces(x)
        low = mla_inputs(spec, pieces, norms, angles, positions, cache, self._kv_a_norm.eps)
        pieces = self._q.pieces(x if norm is None else low)
        queries = mla_queries(spec, pieces, self._keys, angles, positions)
        latents = torch.empty(x.shape[0], spec.num_heads, spec.kv_lora_rank, device=x.device)
        attend(queries, cache, positions, self._shape, bound, latents)
        return self._o.pieces(mla_values(spec, latents, self._values))


class GqaDecode:
    """Grouped-query attention; see headwater.model.gqa."""

    def __init__(self, spec: GqaSpec, weights: ResidentWeights, angles: Angles) -> None:
        self._spec = spec
        self._angles = angles
        self._shape = cache_shape(spec)
        self.entry_shape = self._shape.entry
        self._inputs = ResidentMatrix.joined([weights.matrix(name) for name in "qkv"])
        self._o = weights.matrix("o")
        self._norms = None
        if spec.has_qk_norm:
            self._norms = weights.norm("q_norm"), weights.norm("k_norm")

    def __call__(self, x: Tensor, positions: Tensor, cache: Tensor, bound: int) -> Tensor:
        """As MlaDecode, over a cache [T, context, 2, kv heads, head_dim]."""
        if x.is_cuda:
            return self._fused(x, positions, cache, bound)
        spec, count = self._spec, x.shape[0]
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        inputs = self._inputs.product(x).view(count, -1, spec.head_dim)
        q, k, v = inputs.split([heads, kv_heads, kv_heads], dim=1)
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        q, k = self._angles.rotate(q, positions), self._angles.rotate(k, positions)
        cache[torch.arange(count), positions] = for_cache(torch.stack((k, v), dim=1))

        out = attended(q * spec.softmax_scale, cache[:, :bound], positions, self._shape)
        return self._o.pieces(rounded(out.flatten(1)))

    def _fused(self, x: Tensor, positions: Tensor, cache: Tensor, bound: int) -> Tensor:
        """The same in few kernels."""
        from headwater.gpu.kernels.attend import attend
        from headwater.gpu.kernels.decode_steps import gqa_inputs

        spec = self._spec
        angles = self._angles.cos, self._angles.sin
        pieces = self._inputs.pieces(x)
        queries = gqa_inputs(spec, pieces, self._norms, angles, positions, cache)
        width = spec.num_heads * spec.head_dim
        out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        attend(queries, cache, positions, self._shape, bound, out)
        return self._o.pieces(out)
