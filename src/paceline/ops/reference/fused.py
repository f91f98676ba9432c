"""Norms, rotary embedding, gated activation and cache writes in plain torch: the definition.

Every faster implementation is checked against these. They run on any device and dtype, compute in
float32 (float64 for float64 inputs) and round once, at the end.

Letters: T tokens, H hidden size, Hq/Hkv heads, D head size, P positions, I intermediate size,
S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.reference import kv

if TYPE_CHECKING:
    from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic on `dtype` runs in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension (Zhang & Sennrich, arXiv 1910.07467).

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype.
    """
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    return (y * weight.to(y.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    The sum is rounded to the residual's dtype before it is normalised, so that the normed value is
    that of the residual stream as it is stored.

    Args:
        x: [T, H], what a layer adds.
        residual: [T, H], the stream so far.
        weight: [H].
        eps: added to the mean square.
    """
    stream = (residual.to(wide(x.dtype)) + x.to(wide(x.dtype))).to(residual.dtype)
    return rms_norm(stream, weight, eps), stream


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, halves paired (Su et al., arXiv 2104.09864).

    Element i of the first half is paired with element i of the second ("neox" form).

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D].
        positions: [T] int64 rows of `cos_sin`.
        cos_sin: [P, D] float32 or wider: D/2 cosines, then D/2 sines.

    Returns:
        New (q, k), in their dtypes.
    """
    at = cos_sin[positions].unsqueeze(1)
    cos, sin = at.chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        kind = torch.promote_types(wide(x.dtype), cos.dtype)
        a, b = x.to(kind).chunk(2, dim=-1)
        c, s = cos.to(kind), sin.to(kind)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (SwiGLU, Shazeer, arXiv 2002.05202).

    Args:
        gate_up: [T, 2I]: gate, then up.

    Returns:
        [T, I] in the same dtype.
    """
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def kv_write(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store keys and values of T tokens in one layer's caches, in place.

    Args:
        k_cache: [Hkv, S, D]; its last slot is a dummy.
        v_cache: [Hkv, S, D].
        slots: [T] int64, distinct; -1 writes nothing that anybody sees.
        k: [T, Hkv, D].
        v: [T, Hkv, D].
    """
    kv.write(k_cache, slots, k)
    kv.write(v_cache, slots, v)


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Take apart a fused projection: store its keys, rotated, and values; return rotated queries.

    The same as `rms_norm` of each query and key head (if there are norms), `rope` and `kv_write`, each
    of which rounds.

    Args:
        qkv: [T, (Hq + 2 Hkv) D]: queries, keys, values.
        positions: [T] int64 rows of `cos_sin`.
        cos_sin: [P, D] float32 or wider: D/2 cosines, then D/2 sines.
        slots: [T] int64, distinct; -1 writes nothing that anybody sees.
        k_cache: [Hkv, S, D]; its last slot is a dummy.
        v_cache: [Hkv, S, D].
        norms: weights [D] of the norms of queries and of keys, or None.
        eps: of the norms.

    Returns:
        [T, Hq, D] in qkv's dtype.
    """
    kv_heads, _, dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // dim, dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    q, k = rope(q, k, positions, cos_sin)
    kv_write(k_cache, v_cache, slots, k, v)
    return q
