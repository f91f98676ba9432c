"""Device code of `ops/triton/chain.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "r_stride"])
def chain_kernel(
    roots, ids, weights, tokens, scores,
    num_rows, r_stride, ids_row, ids_at, weights_row, weights_at,
    POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows' chains; sums go from left to right, so that none is above the one before."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < num_rows
    to = row * (POSITIONS + 1)
    score = tl.zeros([ROWS], tl.float32)
    tl.store(tokens + to, tl.load(roots + row * r_stride, mask=here, other=0), mask=here)
    tl.store(scores + to, score, mask=here)
    for position in tl.static_range(POSITIONS):
        token = tl.load(ids + row * ids_row + position * ids_at, mask=here, other=0)
        score += tl.load(weights + row * weights_row + position * weights_at, mask=here, other=0.0)
        tl.store(tokens + to + position + 1, token, mask=here)
        tl.store(scores + to + position + 1, score, mask=here)


@triton.jit(do_not_specialize=["size"])
def emitted_kernel(cu, next_ids, out, size, POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """One row's emitted tokens."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(cu + row)
    stop = tl.load(cu + row + 1)
    position = tl.arange(0, BLOCK)
    inside = position < POSITIONS
    at = start + position
    here = inside & (at < stop) & (at < size)
    token = tl.load(next_ids + at, mask=here, other=-1)
    tl.store(out + row * POSITIONS + position, token, mask=inside)
