"""Device code of `ops/triton/pick.py`, where its structure and its letters are explained.

This file: numbers that all its kernels share (keyed noise, order of numbers, weights), and the two
kernels that serve rows without filters. `pick_filter_kernels.py` has the rest.

Order. A float32's bits as an int32 whose lower 31 are flipped where it is negative are ordered as the
numbers are. With the id below them, reversed, one int64 holds the reference's whole rule "value
descending, then id ascending", so every reduction is a maximum, and no result depends on how a row is
cut into parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr(0x7FFFFFFF)  # above every token id
LOWEST = tl.constexpr(-(2**63))  # below every ordered token
LEAST = tl.constexpr(-3.0e38)  # below every score that matters; -inf has no differences
NOT_FINITE = tl.constexpr(-2)  # core.tree.NOT_FINITE; a test compares them

# What a row waits for.
DONE = tl.constexpr(0)
VERIFY = tl.constexpr(1)  # its candidate is to be judged
SOLVE = tl.constexpr(2)  # its best tokens lie in a list
WALK = tl.constexpr(3)  # top_k, and no list that holds its best tokens

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MUL_A = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MUL_B = tl.constexpr(0x94D049BB133111EB - 2**64)
_MUL_C = tl.constexpr(0x7FEB352D)
_MUL_D = tl.constexpr(0x846CA68B - 2**32)
_MASS = tl.constexpr(2.0**40)


@triton.jit
def noise_words(key, position):
    """`sample.noise.noise_words_of` for one row: two int32 out of a key and a position, int64."""
    x = key + position * _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MUL_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MUL_B
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return x.to(tl.int32), (x >> 32).to(tl.int32)


@triton.jit
def uniforms(tokens, word_0, word_1):
    """v of `sample.noise.gumbel` under `hash_tokens`' bits of int32 tokens; float32, 0 < v < 1."""
    x = tokens ^ word_0
    x = x ^ ((x >> 16) & 0xFFFF)  # `>>` copies the sign; the mask makes it logical
    x = x * _MUL_C
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x ^ word_1
    x = x * _MUL_D
    x = x ^ ((x >> 16) & 0xFFFF)
    v = (x.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(v, 0.99999994)


@triton.jit
def gumbel(v):
    """-log(-log1p(-v)). 1 - v is rounded; what was lost is added to its logarithm, where v is small."""
    u = 1.0 - v
    lost = (1.0 - u) - v
    return -tl.log(-(tl.log(u) + lost))


@triton.jit
def ordered(x):
    """Int32 that are ordered as float32 numbers are; both zeros are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(key):
    """The float32 behind `ordered`'s int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(x, ids):
    """Int64 in the reference's order: value of x first, among equals the lowest of int32 ids."""
    return (ordered(x).to(tl.int64) << 32) | (ids ^ NO_ID).to(tl.int64)  # NO_ID - ids


@triton.jit
def packed_id(item):
    """The id of a packed token, int64."""
    return (item & NO_ID) ^ NO_ID


@triton.jit
def packed_number(item):
    """The value of a packed token, float32."""
    return number((item >> 32).to(tl.int32))


@triton.jit
def tempered(x, temperature):
    """x / temperature as IEEE rounds it: ties of the reference must be ties here."""
    return tl.div_rn(x, temperature)


@triton.jit
def mass(y, peak):
    """`reference.sampling.mass`: floor(2**40 * exp(y - peak)), int64; 0 for -inf."""
    gap = tl.where(y > float("-inf"), y - peak, float("-inf"))
    return (tl.exp(gap) * _MASS).to(tl.int64)


@triton.jit
def above(y, peak, log_min_p):
    """Whether min_p keeps a token: False for -inf."""
    return (y > float("-inf")) & (tl.where(y > float("-inf"), y - peak, 0.0) >= log_min_p)


@triton.jit
def may_win(y, v, top):
    """Whether noise of v can lift y to a score of `top` or more; sometimes True where it can't.

    g > t only where v < 1 - exp(-exp(-t)) < exp(-t). The slack covers what rounding does to t and to
    the sum; it costs one exponential, where noise costs two logarithms.
    """
    slack = 0.0009765625 + tl.abs(top) * 2.384185791015625e-07
    gap = tl.where(y > float("-inf"), y - top + slack, float("-inf"))
    return v <= tl.exp(tl.minimum(gap, 80.0))


@triton.jit
def temperature_of(temperature, row, stride):
    """A row's temperature, float32."""
    return tl.load(temperature + row * stride).to(tl.float32)


@triton.jit
def limited(top_k, row, stride, size):
    """A row's top_k, int64, and whether it limits anything."""
    count = tl.load(top_k + row * stride)
    return count, count < size


@triton.jit
def faulty(x):
    """1 where x is NaN or +inf, else 0."""
    return tl.where(x < float("inf"), 0, 1)


@triton.jit
def scan_kernel(
    raw, work, rows, positions, temperature, keys, top_k,
    best, peaks, faults, cells,
    raw_stride, work_stride, float_stride, int_stride, size, part, num_parts, num_cells,
    EDITED: tl.constexpr, NOISE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """A part of one row: its best score, its largest number, whether it holds a fault.

    Rows with top_k leave the largest number of each cell instead of scores.
    """
    at = tl.program_id(0)
    index = tl.program_id(1)
    row = tl.load(rows + at)
    x_row = work + at.to(tl.int64) * work_stride
    raw_row = raw + at.to(tl.int64) * raw_stride
    low = index * part
    high = tl.minimum(low + part, size)
    columns = tl.arange(0, BLOCK)
    fault = tl.zeros([BLOCK], tl.int32)
    if EDITED:  # options must not hide that the target has failed
        for start in range(low, high, BLOCK):
            ids = start + columns
            fault |= faulty(tl.load(raw_row + ids, mask=ids < high, other=0.0).to(tl.float32))

    heat = 0.0
    limits = False
    if NOISE:
        heat = temperature_of(temperature, row, float_stride)
        if TOP_K:
            _count, limits = limited(top_k, row, int_stride, size)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    item = tl.full((), LOWEST, tl.int64)
    if heat > 0.0:
        if limits:
            rows_of_cells = tl.arange(0, BLOCK // CELL)
            for start in range(low, high, BLOCK):
                grid = start + rows_of_cells[:, None] * CELL + tl.arange(0, CELL)[None, :]
                x = tl.load(x_row + grid, mask=grid < high, other=float("-inf")).to(tl.float32)
                y = tempered(x, heat)
                fault |= tl.max(tl.max(faulty(y), 1), 0)
                y = tl.where(y < float("inf"), y, float("-inf"))
                most = tl.max(y, 1)
                peak = tl.maximum(peak, tl.max(most, 0))
                cell = start // CELL + rows_of_cells
                tl.store(
                    cells + at.to(tl.int64) * num_cells + cell, ordered(most), mask=cell < num_cells
                )
        else:
            word_0, word_1 = noise_words(tl.load(keys + row * int_stride), tl.load(positions + at))
            top = tl.full((), LEAST, tl.float32)
            for start in range(low, high, BLOCK):
                ids = start + columns
                x = tl.load(x_row + ids, mask=ids < high, other=float("-inf")).to(tl.float32)
                y = tempered(x, heat)
                fault |= faulty(y)
                y = tl.where(y < float("inf"), y, float("-inf"))
                peak = tl.maximum(peak, y)
                v = uniforms(ids, word_0, word_1)
                if tl.max(may_win(y, v, top).to(tl.int32), 0) > 0:
                    score = tl.where(y > float("-inf"), y + gumbel(v), float("-inf"))
                    item = tl.maximum(item, tl.max(packed(score, ids), 0))
                    top = tl.maximum(top, tl.max(score, 0))
    else:
        first = tl.full([BLOCK], NO_ID, tl.int32)
        for start in range(low, high, BLOCK):
            ids = start + columns
            x = tl.load(x_row + ids, mask=ids < high, other=float("-inf")).to(tl.float32)
            fault |= faulty(x)
            better = x > peak
            first = tl.where(better, ids, first)
            peak = tl.where(better, x, peak)
        item = tl.max(packed(peak, first), 0)
    out = at.to(tl.int64) * num_parts + index
    tl.store(best + out, item)
    tl.store(peaks + out, tl.max(peak, 0))
    tl.store(faults + out, tl.max(fault, 0))


@triton.jit
def decide_kernel(
    work, rows, temperature, top_k, top_p, log_min_p,
    best, peaks, faults, tokens, state, lead, peak_of, found,
    work_stride, float_stride, int_stride, size, num_parts, most_k,
    NOISE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Join a row's parts; a row without filters has its token, the others their next kernel."""
    at = tl.program_id(0)
    row = tl.load(rows + at)
    parts = tl.arange(0, PARTS)
    here = parts < num_parts
    base = at.to(tl.int64) * num_parts
    item = tl.max(tl.load(best + base + parts, mask=here, other=LOWEST), 0)
    peak = tl.max(tl.load(peaks + base + parts, mask=here, other=float("-inf")), 0)
    fault = tl.max(tl.load(faults + base + parts, mask=here, other=0), 0)
    finite = (fault == 0) & (peak > float("-inf")) & (peak < float("inf"))
    token = packed_id(item)
    todo = tl.full((), DONE, tl.int32)
    if NOISE:
        if TOP_K or TOP_P or MIN_P:
            heat = temperature_of(temperature, row, float_stride)
            if finite & (heat > 0.0):
                limits = False
                few = False
                if TOP_K:
                    count, limits = limited(top_k, row, int_stride, size)
                    few = count <= most_k
                if limits:
                    todo = tl.where(few, SOLVE, WALK).to(tl.int32)
                else:
                    nucleus = tl.load(top_p + row * float_stride) < 1.0
                    least = tl.load(log_min_p + row * float_stride).to(tl.float32)
                    x = tl.load(work + at.to(tl.int64) * work_stride + token).to(tl.float32)
                    y = tempered(x, heat)
                    judged = nucleus | (y - peak < least)
                    todo = tl.where(judged, VERIFY, DONE).to(tl.int32)
                    tl.store(lead + at, packed(y, token.to(tl.int32)))
        tl.store(state + at, todo)
        tl.store(peak_of + at, peak)
        tl.store(found + at, 0)
    tl.store(tokens + at, tl.where(finite, token, NOT_FINITE))
