"""Device code of `ops/triton/fused.py`, where it is said what each kernel reads and writes.

Triton compiles these functions by their source: types are inferred, and what is `tl.constexpr` makes a
variant. Addresses are computed in 64 bits. Blocks are powers of two; what lies outside is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.triton.overlap_kernels import follow, release


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, residual, weight, out, stream,
    num_rows, inner, outer_stride, inner_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """RMSNorm of some whole rows; with ADDS of the rounded sum, which is stored too.

    Row r of x begins at (r // inner) * outer_stride + (r % inner) * inner_stride.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    follow(OVERLAPS)
    gain = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    there = (row < num_rows)[:, None] & (col < WIDTH)[None, :]
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    to = row[:, None] * WIDTH + col[None, :]
    y = tl.load(x + start[:, None] + col[None, :], mask=there, other=0.0).to(tl.float32)
    if ADDS:
        at = row[:, None] * residual_stride + col[None, :]
        before = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        kept = (before + y).to(stream.dtype.element_ty)
        tl.store(stream + to, kept, mask=there)
        y = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 1) / WIDTH + eps)
    y = y * scale[:, None] * gain[None, :]
    release(OVERLAPS)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def silu_mul_kernel(
    gate_up, out, stride, INNER: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """silu(gate) * up of one token and a block of columns."""
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = col < INNER
    row = gate_up + token * stride
    gate = tl.load(row + col, mask=there, other=0.0).to(tl.float32)
    up = tl.load(row + INNER + col, mask=there, other=0.0).to(tl.float32)
    # exp of what is never positive: neither end overflows.
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    y = gate * sigmoid * up
    release(OVERLAPS)
    tl.store(out + token * INNER + col, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotate(
    row, to, h_stride, to_h_stride, weight, position, cos_sin, angle_stride, eps, first, writes,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Norm (rounded, as a norm of its own would be) and rotate some heads of one token.

    `position` points at the token's. The heads are asked for before it, since the angles wait for it.
    """
    head = first + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK)
    inside = half < DIM // 2
    there = (head < HEADS)[:, None] & inside[None, :]
    at = row + head.to(tl.int64)[:, None] * h_stride + half[None, :]
    a = tl.load(at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + DIM // 2, mask=there, other=0.0).to(tl.float32)
    angles = cos_sin + tl.load(position).to(tl.int64) * angle_stride + half
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + DIM // 2, mask=inside, other=0.0)
    release(OVERLAPS)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
        gain_a = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        gain_b = tl.load(weight + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
        a = (a * scale[:, None] * gain_a[None, :]).to(row.dtype.element_ty).to(tl.float32)
        b = (b * scale[:, None] * gain_b[None, :]).to(row.dtype.element_ty).to(tl.float32)
    c = a * cos[None, :] - b * sin[None, :]
    d = b * cos[None, :] + a * sin[None, :]
    # Rounded to the product's type first: a cache of another type holds what the query's type can.
    c = c.to(row.dtype.element_ty).to(to.dtype.element_ty)
    d = d.to(row.dtype.element_ty).to(to.dtype.element_ty)
    into = to + head.to(tl.int64)[:, None] * to_h_stride + half[None, :]
    tl.store(into, c, mask=there & writes)
    tl.store(into + DIM // 2, d, mask=there & writes)


@triton.jit
def _copy(
    row, to, h_stride, to_h_stride, first, writes,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Copy some heads of one token."""
    head = first + tl.arange(0, BLOCK_H)
    at_d = tl.arange(0, BLOCK_D)
    there = (head < HEADS)[:, None] & (at_d < DIM)[None, :]
    at = row + head.to(tl.int64)[:, None] * h_stride + at_d[None, :]
    values = tl.load(at, mask=there, other=0.0)
    into = to + head.to(tl.int64)[:, None] * to_h_stride + at_d[None, :]
    tl.store(into, values.to(to.dtype.element_ty), mask=there & writes)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def heads_kernel(
    q, k, v, q_to, k_to, v_to, q_weight, k_weight, positions, cos_sin, slots, eps,
    q_t_stride, q_h_stride, k_t_stride, k_h_stride, v_t_stride, v_h_stride,
    to_stride, to_h_stride, angle_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, PAGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: queries, then keys, then (PAGED) values, along the grid's second axis.

    PAGED: keys and values go to slots of a cache, else keys alone to their token's place.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    k_blocks = (K_HEADS + BLOCK_H - 1) // BLOCK_H
    entry = token
    if PAGED:
        entry = tl.load(slots + token).to(tl.int64)
    if block < q_blocks:
        _rotate(
            q + token * q_t_stride, q_to + token * (Q_HEADS * DIM), q_h_stride, DIM,
            q_weight, positions + token, cos_sin, angle_stride, eps, block * BLOCK_H, token >= 0,
            HEADS=Q_HEADS, DIM=DIM, BLOCK=BLOCK, BLOCK_H=BLOCK_H, NORM=NORM, OVERLAPS=OVERLAPS,
        )  # fmt: skip
    elif block < q_blocks + k_blocks:
        _rotate(
            k + token * k_t_stride, k_to + entry * to_stride, k_h_stride, to_h_stride,
            k_weight, positions + token, cos_sin, angle_stride, eps,
            (block - q_blocks) * BLOCK_H, entry >= 0,
            HEADS=K_HEADS, DIM=DIM, BLOCK=BLOCK, BLOCK_H=BLOCK_H, NORM=NORM, OVERLAPS=OVERLAPS,
        )  # fmt: skip
    elif PAGED:
        _copy(
            v + token * v_t_stride, v_to + entry * to_stride, v_h_stride, to_h_stride,
            (block - q_blocks - k_blocks) * BLOCK_H, entry >= 0,
            HEADS=K_HEADS, DIM=DIM, BLOCK_D=2 * BLOCK, BLOCK_H=BLOCK_H,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kernel(
    k, v, k_to, v_to, slots,
    k_t_stride, k_h_stride, v_t_stride, v_h_stride, to_stride, to_h_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some key and value heads of one token to its slot."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_H
    slot = tl.load(slots + token).to(tl.int64)
    _copy(
        k + token * k_t_stride, k_to + slot * to_stride, k_h_stride, to_h_stride, first, slot >= 0,
        HEADS=HEADS, DIM=DIM, BLOCK_D=BLOCK_D, BLOCK_H=BLOCK_H,
    )  # fmt: skip
    _copy(
        v + token * v_t_stride, v_to + slot * to_stride, v_h_stride, to_h_stride, first, slot >= 0,
        HEADS=HEADS, DIM=DIM, BLOCK_D=BLOCK_D, BLOCK_H=BLOCK_H,
    )  # fmt: skip
