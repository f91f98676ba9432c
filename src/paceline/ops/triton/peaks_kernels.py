"""Device code of `ops/triton/peaks.py`: maxima and sums of exponentials, in one read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parts_kernel(
    x, maxima, bases, sums,
    x_stride, size, num_parts, num_cells,
    MAXIMA: tl.constexpr, CELLS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """A part of one row: its cells' maxima, and the sum of exp(x - base) with base its largest number."""
    at = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    cell = index * CELLS + tl.arange(0, CELLS)
    ids = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
    values = tl.load(x + at * x_stride + ids, mask=ids < size, other=float("-inf"))
    most = tl.max(values.to(tl.float32), 1)
    if MAXIMA:
        out = maxima + at * num_cells + cell
        tl.store(out, most.to(maxima.dtype.element_ty), mask=cell < num_cells)
    top = tl.max(most, 0)
    base = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    total = tl.sum(tl.sum(tl.exp(values.to(tl.float32) - base), 1), 0)
    tl.store(bases + at * num_parts + index, tl.where(top == float("-inf"), top, base))
    tl.store(sums + at * num_parts + index, total)


@triton.jit
def join_kernel(bases, sums, tops, logs, num_parts, PARTS: tl.constexpr):
    """Join a row's parts: its base, and the logarithm of the sum of exp(x - base)."""
    at = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    here = part < num_parts
    base = tl.load(bases + at * num_parts + part, mask=here, other=float("-inf"))
    total = tl.load(sums + at * num_parts + part, mask=here, other=0.0)
    wrong = tl.max(tl.where(total >= 0.0, 0, 1), 0) > 0  # NaN
    infinite = tl.max((total == float("inf")).to(tl.int32), 0) > 0
    top = tl.max(base, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    counts = (total > 0.0) & (total < float("inf"))
    joint = tl.sum(tl.where(counts, total, 0.0) * tl.exp(tl.where(counts, base - top, 0.0)), 0)
    log = tl.where(joint > 0.0, tl.log(tl.where(joint > 0.0, joint, 1.0)), float("-inf"))
    log = tl.where(infinite, float("inf"), log)
    tl.store(tops + at, top)
    tl.store(logs + at, tl.where(wrong, float("nan"), log))
