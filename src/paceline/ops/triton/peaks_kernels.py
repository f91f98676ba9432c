"""Device code of `ops/triton/peaks.py`: maxima and sums of exponentials, in one read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def heat_of(temperature, spot, positions, stride, TEMPERED: tl.constexpr):
    """What the numbers of a position are divided by, float32; 1 for greedy rows."""
    heat = tl.full((), 1.0, tl.float32)
    if TEMPERED:
        own = tl.load(temperature + spot // positions * stride).to(tl.float32)
        heat = tl.where(own > 0.0, own, heat)
    return heat


@triton.jit(do_not_specialize=["positions", "t_stride"])
def parts_kernel(
    x, maxima, temperature, bases, sums,
    x_stride, size, num_parts, num_cells, positions, t_stride,
    MAXIMA: tl.constexpr, TEMPERED: tl.constexpr, CELLS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """A part of one row: its cells' maxima, and the sum of exp((x - base) / heat), base its largest number."""
    at = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    cell = index * CELLS + tl.arange(0, CELLS)
    ids = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
    values = tl.load(x + at * x_stride + ids, mask=ids < size, other=float("-inf"))
    values = values.to(tl.float32)
    most = tl.max(values, 1)
    top = tl.max(most, 0)
    base = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    gap = values - base
    if TEMPERED:
        gap = gap * (1.0 / heat_of(temperature, at, positions, t_stride, TEMPERED))
    totals = tl.sum(tl.exp(gap), 1)
    if MAXIMA:
        out = maxima + at * num_cells + cell
        most = tl.where(totals >= 0.0, most, float("nan"))  # the sum of no number is none
        tl.store(out, most.to(maxima.dtype.element_ty), mask=cell < num_cells)
    tl.store(bases + at * num_parts + index, tl.where(top == float("-inf"), top, base))
    tl.store(sums + at * num_parts + index, tl.sum(totals, 0))


@triton.jit
def joined(base, total, scale):
    """Of a row's parts: its base, and the logarithm of the sum of exp((x - base) * scale)."""
    wrong = tl.max(tl.where(total >= 0.0, 0, 1), 0) > 0  # NaN
    infinite = tl.max((total == float("inf")).to(tl.int32), 0) > 0
    top = tl.max(base, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    counts = (total > 0.0) & (total < float("inf"))
    gap = tl.where(counts, base - top, 0.0) * scale
    joint = tl.sum(tl.where(counts, total, 0.0) * tl.exp(gap), 0)
    log = tl.where(joint > 0.0, tl.log(tl.where(joint > 0.0, joint, 1.0)), float("-inf"))
    log = tl.where(infinite, float("inf"), log)
    return top, tl.where(wrong, float("nan"), log)


@triton.jit
def join_kernel(bases, sums, tops, logs, num_parts, PARTS: tl.constexpr):
    """Join a row's parts: its base, and the logarithm of the sum of exp(x - base)."""
    at = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    here = part < num_parts
    base = tl.load(bases + at * num_parts + part, mask=here, other=float("-inf"))
    total = tl.load(sums + at * num_parts + part, mask=here, other=0.0)
    top, log = joined(base, total, 1.0)
    tl.store(tops + at, top)
    tl.store(logs + at, log)
