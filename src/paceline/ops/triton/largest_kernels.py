"""Device code of `ops/triton/largest.py`, where it is said what each kernel does.

Numbers are compared as int32 in their order (`pick_kernels.ordered`), what is no number above all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.triton.peaks_kernels import heat_of, joined
from paceline.ops.triton.pick_kernels import ordered, tempered

_NO_NUMBER = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(-(2**31))  # below the key of -inf


@triton.jit
def _keys(x, here):
    """Int32 in the order of float32 numbers, as `topk` has it; lanes that are not `here` come last."""
    return tl.where(here, tl.where(x >= float("-inf"), ordered(x), _NO_NUMBER), _NOTHING)


@triton.jit
def _border(keys, count, low, high):
    """The greatest key that at least `count` keys reach, or a lower one that no more reach.

    Bisection between two keys, the first of which so many reach. It ends once a key splits them right, which
    among numbers that are no ties is long before its last step.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        low = tl.where(reached >= count, middle, low)
        high = tl.where(reached > count, high, tl.where(reached == count, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
def _places(keys, border, count):
    """Which lanes are among the first `count`, equals by lane, and each one's place, by lane."""
    above = keys > border
    equal = keys == border
    both = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    so_far = both & 0xFFFF
    ties = (both >> 16) & 0xFFFF
    room = count - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (ties <= room))
    return taken, so_far + tl.minimum(ties, room) - 1


@triton.jit(do_not_specialize=["positions", "t_stride"])
def choose_kernel(
    maxima, bases, sums, temperature, mass, chosen, borders,
    num_cells, num_parts, positions, t_stride,
    COUNT: tl.constexpr, CELLS: tl.constexpr, PARTS: tl.constexpr,
    TEMPERED: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """The COUNT blocks of one row that hold its largest numbers, in order; and its whole mass."""
    spot = tl.program_id(0).to(tl.int64)
    heat = heat_of(temperature, spot, positions, t_stride, TEMPERED)
    part = tl.arange(0, PARTS)
    there = part < num_parts
    base = tl.load(bases + spot * num_parts + part, mask=there, other=float("-inf"))
    total = tl.load(sums + spot * num_parts + part, mask=there, other=0.0)
    top, log = joined(base, total, 1.0 / heat)
    tl.store(mass + spot, (tempered(top, heat) + log).to(mass.dtype.element_ty))

    cell = tl.arange(0, CELLS)
    here = cell < num_cells
    most = tl.load(maxima + spot * num_cells + cell, mask=here, other=float("-inf"))
    keys = _keys(most.to(tl.float32), here)
    low = tl.min(tl.where(here, keys, _NO_NUMBER), 0)
    border = _border(keys, COUNT, low, tl.max(keys, 0))
    taken, place = _places(keys, border, COUNT)
    tl.store(chosen + spot * COUNT + place, cell, mask=taken & here)
    if BOUNDS:  # as many numbers as are sought reach the border: one of each block
        tl.store(borders + spot, border)
    else:
        tl.store(borders + spot, _NOTHING + 1)


@triton.jit(do_not_specialize=["positions", "t_stride"])
def take_kernel(
    x, temperature, chosen, borders, top, ids,
    x_stride, size, positions, t_stride,
    COUNT: tl.constexpr, CELLS: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr,
    TEMPERED: tl.constexpr,
):  # fmt: skip
    """The COUNT largest numbers of one row's chosen blocks and their ids, in the order of ids."""
    spot = tl.program_id(0).to(tl.int64)
    heat = heat_of(temperature, spot, positions, t_stride, TEMPERED)
    at = tl.arange(0, BLOCK)
    inside = at < CELLS * CELL
    cell = tl.load(chosen + spot * CELLS + at // CELL, mask=inside, other=0)
    token = cell * CELL + at % CELL
    here = inside & (token < size)
    y = tl.load(x + spot * x_stride + token, mask=here, other=float("-inf")).to(tl.float32)
    keys = _keys(y, here)
    border = _border(keys, COUNT, tl.load(borders + spot), tl.max(keys, 0))
    taken, place = _places(keys, border, COUNT)
    # Few are read again: until here keys alone are held in registers. No lane outside reaches a border.
    cell = tl.load(chosen + spot * CELLS + at // CELL, mask=taken, other=0)
    token = cell * CELL + at % CELL
    y = tl.load(x + spot * x_stride + token, mask=taken, other=0.0).to(tl.float32)
    to = spot * COUNT + place
    tl.store(top + to, tempered(y, heat).to(top.dtype.element_ty), mask=taken)
    tl.store(ids + to, token.to(tl.int64), mask=taken)
