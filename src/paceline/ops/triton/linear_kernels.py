"""Device code of `ops/triton/linear.py`, where it is said what each kernel reads and writes.

Addresses are computed in 64 bits. Blocks are powers of two; what lies outside is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.triton.overlap_kernels import follow, release


@triton.jit(do_not_specialize=["rows", "steps"])
def product_kernel(
    x, weight, out, rows, n, k, steps, x_stride, w_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """All rows (BLOCK_M at most) by a block of features, over one part of K: `steps` blocks of it.

    Part s goes to out[s], [rows, n]. EVEN: no block reaches over the edge. SWAP: the weight is the
    left factor, which lets the wide tensor instructions of Hopper multiply few rows.
    """
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = weight + col.to(tl.int64)[:, None] * w_stride + inner[None, :]
    first = part * steps
    follow(OVERLAPS)
    last = tl.minimum(first + steps, tl.cdiv(k, BLOCK_K))
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, last):
        at = step * BLOCK_K
        if EVEN_K:
            a_mask = (row < rows)[:, None]
        else:
            a_mask = (row < rows)[:, None] & (inner < k - at)[None, :]
        a = tl.load(x_at + at, mask=a_mask, other=0.0, eviction_policy="evict_last")
        # The weight is read once in a step: it should push nothing out of a cache.
        if EVEN_N and EVEN_K:
            b = tl.load(w_at + at, eviction_policy="evict_first")
        else:
            b_mask = (col < n)[:, None] & (inner < k - at)[None, :]
            b = tl.load(w_at + at, mask=b_mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(b, tl.trans(a), acc) if SWAP else tl.dot(a, tl.trans(b), acc)
    release(OVERLAPS)
    place = (part.to(tl.int64) * rows + row) * n
    if SWAP:
        to = out + place[None, :] + col[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (col < n)[:, None])
    else:
        to = out + place[:, None] + col[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (col < n)[None, :])


@triton.jit(do_not_specialize=["rows"])
def join_norm_kernel(
    partials, residual, weight, out, stream, rows, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: partial products [PARTS, rows, WIDTH] added in their order, the stream, its RMSNorm.

    The product is rounded, and then its sum with the residual, as two operators do it.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    there = col < WIDTH
    follow(OVERLAPS)
    before = tl.load(residual + row * residual_stride + col, mask=there, other=0.0)
    gain = tl.load(weight + col, mask=there, other=0.0).to(tl.float32)
    total = tl.load(partials + row * WIDTH + col, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(partials + (row + part * rows) * WIDTH + col, mask=there, other=0.0)
    y = total.to(out.dtype.element_ty).to(tl.float32)
    kept = (before.to(tl.float32) + y).to(stream.dtype.element_ty)
    tl.store(stream + row * WIDTH + col, kept, mask=there)
    y = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    release(OVERLAPS)
    tl.store(out + row * WIDTH + col, (y * scale * gain).to(out.dtype.element_ty), mask=there)
