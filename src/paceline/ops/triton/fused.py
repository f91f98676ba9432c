"""Norms, rotary embedding, gated activation and cache writes on a GPU: one Triton kernel each.

What a kernel reads and writes, each number once, apart from tables that stay in a cache:

    add_rms_norm   x and the stream in; the new stream and its norm out       one program a row
    rms_norm       x in, its norm out                                         one program some rows
    rope_write     the qkv product in; rotated queries out, keys and values   one program a token and
                   straight to their slots                                    eight heads
    rope           q, k in; rotated q, k out                                  likewise
    silu_mul       gate and up in, their product out                          a program 1,024 columns
    kv_write       k, v in, out to their slots                                a program eight heads

Arithmetic is in float32, rounded once, but for `rope_write`, which rounds after a head's norm as its
definition does. How a row is computed depends on its width alone, so its bits do not depend on how many
rows there are.

Anything out of the ordinary (gradients, odd strides, float64) goes to the reference, so that these
functions take all that the reference takes. Grids follow from shapes: all can be captured.

Letters: T tokens, H hidden size, Hq/Hkv heads, D head size, P positions, I intermediate size,
S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.cpu.native import needs_grad
from paceline.ops.reference import fused as reference
from paceline.ops.triton import overlap
from paceline.ops.triton.fused_kernels import (
    heads_kernel,
    norm_kernel,
    silu_mul_kernel,
    write_kernel,
)
from paceline.ops.triton.refusal import DTYPES
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

WIDEST = 1 << 15  # numbers of a row that one program can hold
_COLUMNS = 1024  # of a program of silu_mul; rows of a norm share a program up to as many numbers
_HEADS = 8  # of a program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.fused.rms_norm`; rows are the last dimension of up to three."""
    plain = 1 <= x.ndim <= 3 and x.stride(-1) == 1 and weight.is_contiguous()
    if not plain or x.shape[-1] > WIDEST or not _served(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.fused.add_rms_norm`."""
    plain = x.ndim == 2 and x.shape == residual.shape and weight.is_contiguous()
    plain = plain and x.stride(1) == 1 and residual.stride(1) == 1
    if not plain or x.shape[1] > WIDEST or not _served(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out, stream = (torch.empty(x.shape, dtype=residual.dtype, device=x.device) for _ in range(2))
    _norm(x, weight, eps, out, residual, stream)
    return out, stream


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.fused.rope`."""
    plain = q.stride(2) == 1 and k.stride(2) == 1 and q.dtype == k.dtype
    if not plain or not _has_angles(cos_sin, q.shape[2]) or not _served(q, k):
        return reference.rope(q, k, positions, cos_sin)
    q_to, k_to = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _heads(q, k, None, q_to, k_to, None, positions, cos_sin)
    return q_to, k_to


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
    """See `reference.fused.rope_write`."""
    kv_heads, _, dim = k_cache.shape
    gains = norms or ()
    plain = qkv.stride(1) == 1 and _lie_alike(k_cache, v_cache) and _has_angles(cos_sin, dim)
    plain = plain and all(gain.is_contiguous() for gain in gains)
    if not plain or not _served(qkv, k_cache, v_cache, *gains):
        return reference.rope_write(qkv, positions, cos_sin, slots, k_cache, v_cache, norms, eps)
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // dim, dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    q_to = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _heads(q, k, v, q_to, k_cache, v_cache, positions, cos_sin, slots, norms, eps)
    return q_to


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.fused.silu_mul`."""
    if gate_up.ndim != 2 or gate_up.stride(1) != 1 or not _served(gate_up):
        return reference.silu_mul(gate_up)
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(_COLUMNS, power_of_two(inner))
    with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
        silu_mul_kernel[(tokens, -(-inner // block))](
            gate_up,
            out,
            gate_up.stride(0),
            INNER=inner,
            BLOCK=block,
            num_warps=4,
            **overlap.between(out),
        )
    return out


def kv_write(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `reference.fused.kv_write`."""
    plain = k.stride(2) == 1 and v.stride(2) == 1 and _lie_alike(k_cache, v_cache)
    if not plain or not _served(k_cache, v_cache, k, v):
        reference.kv_write(k_cache, v_cache, slots, k, v)
        return
    tokens, kv_heads, dim = k.shape
    if k.numel() == 0:
        return
    with torch.cuda.device_of(k):  # type: ignore[no-untyped-call]
        write_kernel[(tokens, -(-kv_heads // _HEADS))](
            k,
            v,
            k_cache,
            v_cache,
            slots.contiguous(),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(1),
            k_cache.stride(0),
            HEADS=kv_heads,
            DIM=dim,
            BLOCK_D=power_of_two(dim),
            BLOCK_H=_HEADS,
            num_warps=4,
        )


def _served(*tensors: Tensor) -> bool:
    """Whether the kernels take tensors of these types, and neither gradients nor a graph are wanted.

    torch.compile fuses the reference itself, with what is around it.
    """
    if torch.compiler.is_compiling():
        return False
    return all(x.dtype in DTYPES for x in tensors) and not needs_grad(*tensors)


def _has_angles(cos_sin: Tensor, dim: int) -> bool:
    """Whether a rotary table is as the kernels read it."""
    right = cos_sin.dtype == torch.float32 and cos_sin.shape[1] == dim and dim % 2 == 0
    return right and cos_sin.stride(1) == 1


def _lie_alike(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether one set of strides serves both caches."""
    return k_cache.stride() == v_cache.stride() and k_cache.stride(2) == 1


def _norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    stream: Tensor | None = None,
) -> None:
    """Launch the norm of all rows of x."""
    width = x.shape[-1]
    if out.numel() == 0:
        return
    rows = out.numel() // width
    inner, step = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    block = power_of_two(width)
    together = max(1, _COLUMNS // block)
    # Kernels take pointers: one that is not used may be anything.
    before, after = (out, out) if residual is None or stream is None else (residual, stream)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        norm_kernel[(-(-rows // together),)](
            x,
            before,
            weight,
            out,
            after,
            rows,
            inner,
            x.stride(0) if x.ndim > 1 else 0,
            step,
            width if residual is None else residual.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            ROWS=together,
            ADDS=residual is not None,
            num_warps=min(16, max(4, block // 512)),
            **overlap.between(out),
        )


def _heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_to: Tensor,
    k_to: Tensor,
    v_to: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Launch the rotation of q and k [T, heads, D]; with slots into caches [Hkv, S, D], and v too."""
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    blocks = -(-q_heads // _HEADS) + (1 if slots is None else 2) * -(-kv_heads // _HEADS)
    if tokens == 0 or blocks == 0:
        return
    positions = positions.contiguous()
    entry, head = (0, 1) if slots is None else (1, 0)  # which dimension of k_to is which
    # Kernels take pointers: one that is not used may be anything.
    values, values_to = (k, k_to) if v is None or v_to is None else (v, v_to)
    q_gain, k_gain = norms or (cos_sin, cos_sin)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        heads_kernel[(tokens, blocks)](
            q,
            k,
            values,
            q_to,
            k_to,
            values_to,
            q_gain,
            k_gain,
            positions,
            cos_sin,
            positions if slots is None else slots.contiguous(),
            eps,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            values.stride(0),
            values.stride(1),
            k_to.stride(entry),
            k_to.stride(head),
            cos_sin.stride(0),
            Q_HEADS=q_heads,
            K_HEADS=kv_heads,
            DIM=dim,
            BLOCK=power_of_two(dim // 2),
            BLOCK_H=_HEADS,
            NORM=norms is not None,
            PAGED=slots is not None,
            num_warps=4,
            **overlap.between(q),
        )
