"""Device code of `ops/triton/product_invariant.py`: one tile and one loop over K for all numbers of rows.

Addresses are computed in 64 bits. Blocks are powers of two; what lies outside is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "row_blocks"])
def product_kernel(
    x, weight, bias, out, rows, row_blocks, n, k, steps, x_stride, w_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A block of rows by a block of features, over one part of K: `steps` blocks of it.

    Part s goes to out[s], [rows, n]. EVEN: no block reaches over the edge.
    """
    # Programs that read the same block of the weight run side by side.
    row = (tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = weight + col.to(tl.int64)[:, None] * w_stride + inner[None, :]
    first = part * steps
    last = tl.minimum(first + steps, tl.cdiv(k, BLOCK_K))
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, last):
        begin = step * BLOCK_K
        if EVEN_K:
            a_mask = (row < rows)[:, None]
        else:
            a_mask = (row < rows)[:, None] & (inner < k - begin)[None, :]
        a = tl.load(x_at + begin, mask=a_mask, other=0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(w_at + begin)
        else:
            b_mask = (col < n)[:, None] & (inner < k - begin)[None, :]
            b = tl.load(w_at + begin, mask=b_mask, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    place = (part.to(tl.int64) * rows + row) * n
    there = (row < rows)[:, None] & (col < n)[None, :]
    tl.store(out + place[:, None] + col[None, :], acc.to(out.dtype.element_ty), mask=there)
