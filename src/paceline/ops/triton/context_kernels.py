"""Device code of `ops/triton/context.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def context_kernel(
    product, k_to, v_to, gains, positions, cos_sin, slots, eps,
    t_stride, layer_stride, head_stride, slot_stride, gain_stride, angle_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some key and value heads of one layer of one token: norm and rotation of keys, both to their slot."""
    token = tl.program_id(0).to(tl.int64)
    blocks = (HEADS + BLOCK_H - 1) // BLOCK_H
    layer = (tl.program_id(1) // blocks).to(tl.int64)
    head = tl.program_id(1) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, HALF)
    slot = tl.load(slots + token).to(tl.int64)
    inside = half < DIM // 2
    there = (head < HEADS)[:, None] & inside[None, :] & (slot >= 0)
    row = product + token * t_stride + layer * (2 * HEADS * DIM)
    k_at = row + head[:, None] * DIM + half[None, :]
    v_at = k_at + HEADS * DIM
    a = tl.load(k_at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(k_at + DIM // 2, mask=there, other=0.0).to(tl.float32)
    v_a = tl.load(v_at, mask=there, other=0.0)
    v_b = tl.load(v_at + DIM // 2, mask=there, other=0.0)
    gain_at = gains + layer * gain_stride + half
    gain_a = tl.load(gain_at, mask=inside, other=0.0).to(tl.float32)
    gain_b = tl.load(gain_at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * angle_stride + half
    turns = inside & (slot >= 0)
    cos = tl.load(angle, mask=turns, other=0.0)
    sin = tl.load(angle + DIM // 2, mask=turns, other=0.0)

    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
    # Rounded as a norm of its own would be, and after the rotation, before a cache of another type.
    a = (a * scale[:, None] * gain_a[None, :]).to(product.dtype.element_ty).to(tl.float32)
    b = (b * scale[:, None] * gain_b[None, :]).to(product.dtype.element_ty).to(tl.float32)
    c = (a * cos[None, :] - b * sin[None, :]).to(product.dtype.element_ty)
    d = (b * cos[None, :] + a * sin[None, :]).to(product.dtype.element_ty)
    to = layer * layer_stride + slot * slot_stride
    to += head.to(tl.int64)[:, None] * head_stride + half[None, :]
    tl.store(k_to + to, c.to(k_to.dtype.element_ty), mask=there)
    tl.store(k_to + to + DIM // 2, d.to(k_to.dtype.element_ty), mask=there)
    tl.store(v_to + to, v_a.to(v_to.dtype.element_ty), mask=there)
    tl.store(v_to + to + DIM // 2, v_b.to(v_to.dtype.element_ty), mask=there)
