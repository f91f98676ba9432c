"""Norms, rotary embedding, gated activation and cache writes as single calls of own kernels.

Anything out of the ordinary (gradients, odd strides, mixed dtypes) goes to the reference, so that
these functions take all that the reference takes.

Letters: T tokens, H hidden size, Hq/Hkv heads, D head size, P positions, I intermediate size,
S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.cpu.native import DTYPES, Native, native, needs_grad
from paceline.ops.cpu.threads import kernel_threads
from paceline.ops.reference import fused as reference

if TYPE_CHECKING:
    from torch import Tensor


def _lib() -> Native:
    lib = native()
    assert lib is not None, "dispatch chose own kernels where there are none"
    return lib


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.fused.rms_norm`; rows are the last dimension of up to three."""
    if x.ndim > 3 or x.ndim < 1 or x.stride(-1) != 1 or weight.dtype not in DTYPES:
        return reference.rms_norm(x, weight, eps)
    if not weight.is_contiguous() or needs_grad(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    width = x.shape[-1]
    inner, step = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    outer, stride = (x.shape[0], x.stride(0)) if x.ndim > 1 else (1, 0)
    kind = DTYPES[x.dtype]
    _lib().rms_norm(
        x.data_ptr(),
        None,
        weight.data_ptr(),
        out.data_ptr(),
        None,
        outer * inner,
        inner or 1,
        width,
        stride,
        step,
        eps,
        kind,
        DTYPES[weight.dtype],
        kernel_threads(),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.fused.add_rms_norm`."""
    plain = x.ndim == 2 and x.is_contiguous() and residual.is_contiguous()
    if not plain or x.dtype != residual.dtype or weight.dtype not in DTYPES:
        return reference.add_rms_norm(x, residual, weight, eps)
    if not weight.is_contiguous() or needs_grad(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out, stream = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    _lib().rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        stream.data_ptr(),
        rows,
        1,
        width,
        width,
        0,
        eps,
        DTYPES[x.dtype],
        DTYPES[weight.dtype],
        kernel_threads(),
    )
    return out, stream


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.fused.rope`."""
    plain = q.stride(2) == 1 and k.stride(2) == 1 and q.dtype == k.dtype
    plain = plain and cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
    if not plain or cos_sin.shape[1] != q.shape[2] or needs_grad(q, k):
        return reference.rope(q, k, positions, cos_sin)
    if positions.dtype != torch.int64 or not positions.is_contiguous():
        positions = positions.to(torch.int64).contiguous()
    q_to, k_to = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    q_token, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    _lib().rope(
        q.data_ptr(),
        k.data_ptr(),
        q_to.data_ptr(),
        k_to.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        q_token,
        q_head,
        k_token,
        k_head,
        DTYPES[q.dtype],
        kernel_threads(),
    )
    return q_to, k_to


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.fused.silu_mul`."""
    if gate_up.ndim != 2 or gate_up.stride(1) != 1 or needs_grad(gate_up):
        return reference.silu_mul(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    _lib().silu_mul(
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        gate_up.stride(0),
        DTYPES[gate_up.dtype],
        kernel_threads(),
    )
    return out


def kv_write(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `reference.fused.kv_write`."""
    like = k_cache.dtype == v_cache.dtype == k.dtype == v.dtype
    plain = like and k.stride(2) == 1 and v.stride(2) == 1 and slots.is_contiguous()
    if not plain or k_cache.stride() != v_cache.stride() or not k_cache[0].is_contiguous():
        reference.kv_write(k_cache, v_cache, slots, k, v)
        return
    size = k.dtype.itemsize
    _lib().kv_write(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        k.shape[0],
        k.shape[1],
        k.shape[2] * size,
        k_cache.stride(0) * size,
        k.stride(0) * size,
        k.stride(1) * size,
        v.stride(0) * size,
        v.stride(1) * size,
    )
