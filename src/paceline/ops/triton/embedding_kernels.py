"""Device code of `ops/triton/embedding.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["token_ids"])
def rows_kernel(
    token_ids, weight, out, size, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Some columns of one token's row."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.load(token_ids + at).to(tl.int64)
    there = inside & (token >= 0) & (token < size)
    row = tl.load(weight + token * stride + column, mask=there, other=float("nan"))
    tl.store(out + at * WIDTH + column, row, mask=inside)
