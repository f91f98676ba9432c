"""Device code of `ops/triton/pick.py` for rows with min_p, top_k or top_p.

What all three leave is a row's first n tokens in the order of `packed`, so they are one cut, and a token
passes if few enough tokens, and little enough mass, stand before it. See `pick.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.triton.pick_kernels import (
    DONE,
    LEAST,
    LOWEST,
    SOLVE,
    VERIFY,
    WALK,
    above,
    gumbel,
    mass,
    may_win,
    noise_words,
    packed,
    packed_id,
    packed_number,
    temperature_of,
    tempered,
    uniforms,
)


@triton.jit
def enough_of(share, total):
    """Mass before which tokens belong to a nucleus, float64; there is no end to it at top_p 1."""
    return tl.where(share >= 1.0, float("inf"), share * total.to(tl.float64))


@triton.jit
def bound_kernel(
    cells, rows, top_k, state, bounds, int_stride, num_cells,
    CELLS: tl.constexpr,
):  # fmt: skip
    """The k-th largest of a row's cells' largest numbers: the k best tokens are at least that."""
    at = tl.program_id(0)
    if tl.load(state + at) == SOLVE:
        count = tl.load(top_k + tl.load(rows + at) * int_stride).to(tl.int32)
        cell = tl.arange(0, CELLS)
        keys = tl.load(
            cells + at.to(tl.int64) * num_cells + cell, mask=cell < num_cells, other=-2147483648
        )
        bound = tl.full((), -2147483648, tl.int32)
        enough = tl.sum((keys >= 0).to(tl.int32), 0) >= count
        bound = tl.where(enough, 0, bound)
        for i in range(31):
            higher = bound + (tl.full((), 1, tl.int32) << (30 - i))
            enough = tl.sum((keys >= higher).to(tl.int32), 0) >= count
            bound = tl.where(enough, higher, bound)
        tl.store(bounds + at, bound)


@triton.jit
def gather_kernel(
    work, rows, temperature, state, cells, bounds, found, items,
    work_stride, float_stride, size, part, num_cells, room,
    GROUP: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """List a part's tokens that are at least the bound, in any order; only their cells are read."""
    at = tl.program_id(0)
    if tl.load(state + at) == SOLVE:
        heat = temperature_of(temperature, tl.load(rows + at), float_stride)
        bound = tl.load(bounds + at)
        low = tl.program_id(1) * part
        high = tl.minimum(low + part, size)
        for start in range(low, high, GROUP):
            ids = start + tl.arange(0, GROUP)
            cell = tl.load(
                cells + at.to(tl.int64) * num_cells + ids // CELL,
                mask=ids < high,
                other=-2147483648,
            )
            near = (cell >= bound) & (ids < high)
            if tl.max(near.to(tl.int32), 0) > 0:
                x = tl.load(
                    work + at.to(tl.int64) * work_stride + ids, mask=near, other=float("-inf")
                ).to(tl.float32)
                y = tempered(x, heat)
                item = packed(y, ids)
                takes = near & (y > float("-inf")) & ((item >> 32) >= bound)
                number = tl.sum(takes.to(tl.int32), 0)
                first = tl.atomic_add(found + at, number)
                place = first + tl.cumsum(takes.to(tl.int32), 0) - 1
                tl.store(items + at.to(tl.int64) * room + place, item, mask=takes & (place < room))


@triton.jit
def solve_kernel(
    rows, positions, keys, top_k, top_p, log_min_p, state, peak_of, found, items, tokens,
    float_stride, int_stride, room,
    TOP_P: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """A row whose best tokens are listed: each is compared with all, then the best score wins."""
    at = tl.program_id(0)
    if tl.load(state + at) == SOLVE:
        number = tl.load(found + at)
        if number > room:
            tl.store(state + at, WALK)
        else:
            row = tl.load(rows + at)
            count = tl.load(top_k + row * int_stride).to(tl.int32)
            least = tl.load(log_min_p + row * float_stride).to(tl.float32)
            peak = tl.load(peak_of + at)
            word_0, word_1 = noise_words(tl.load(keys + row * int_stride), tl.load(positions + at))
            list_of = items + at.to(tl.int64) * room
            each = tl.arange(0, ITEMS)
            total = tl.full((), 0, tl.int64)
            share = tl.full((), 2.0, tl.float64)
            if TOP_P:
                share = tl.load(top_p + row * float_stride)
                for start in range(0, number, ITEMS):
                    mine = tl.load(list_of + start + each, mask=start + each < number, other=LOWEST)
                    rank = tl.zeros([ITEMS], tl.int32)
                    for other in range(0, number, ITEMS):
                        theirs = tl.load(
                            list_of + other + each, mask=other + each < number, other=LOWEST
                        )
                        rank += tl.sum((theirs[None, :] > mine[:, None]).to(tl.int32), 1)
                    y = packed_number(mine)
                    y = tl.where(start + each < number, y, float("-inf"))
                    kept = (rank < count) & above(y, peak, least)
                    total += tl.sum(tl.where(kept, mass(y, peak), 0), 0)
            enough = enough_of(share, total)
            won = tl.full((), LOWEST, tl.int64)
            for start in range(0, number, ITEMS):
                mine = tl.load(list_of + start + each, mask=start + each < number, other=LOWEST)
                rank = tl.zeros([ITEMS], tl.int32)
                before = tl.zeros([ITEMS], tl.int64)
                for other in range(0, number, ITEMS):
                    there = other + each < number
                    theirs = tl.load(list_of + other + each, mask=there, other=LOWEST)
                    less = theirs[None, :] > mine[:, None]
                    rank += tl.sum(less.to(tl.int32), 1)
                    if TOP_P:
                        weight = mass(tl.where(there, packed_number(theirs), float("-inf")), peak)
                        before += tl.sum(tl.where(less, weight[None, :], 0), 1)
                y = tl.where(start + each < number, packed_number(mine), float("-inf"))
                kept = (rank < count) & above(y, peak, least)
                if TOP_P:
                    kept = kept & ((before.to(tl.float64) < enough) | (before == 0))
                ids = packed_id(mine).to(tl.int32)
                score = tl.where(kept, y + gumbel(uniforms(ids, word_0, word_1)), float("-inf"))
                won = tl.maximum(won, tl.max(tl.where(kept, packed(score, ids), LOWEST), 0))
            tl.store(tokens + at, packed_id(won))
            tl.store(state + at, DONE)


@triton.jit
def judge_part(
    x_row, low, high, heat, peak, least, word_0, word_1, lead, cut,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What stands before the candidate `lead` in ids low ... high - 1, of tokens at or above `cut`.

    Returns the mass of all that min_p leaves, the mass of those before the candidate, and their best
    score, packed.
    """
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    before = tl.zeros([BLOCK], tl.int64)
    item = tl.full((), LOWEST, tl.int64)
    top = tl.full((), LEAST, tl.float32)
    for start in range(low, high, BLOCK):
        ids = start + columns
        x = tl.load(x_row + ids, mask=ids < high, other=float("-inf")).to(tl.float32)
        y = tempered(x, heat)
        place = packed(y, ids)
        kept = above(y, peak, least) & (place >= cut)
        weight = tl.where(kept, mass(y, peak), 0)
        total += weight
        kept = kept & (place > lead)
        before += tl.where(kept, weight, 0)
        v = uniforms(ids, word_0, word_1)
        if tl.max((kept & may_win(y, v, top)).to(tl.int32), 0) > 0:
            score = tl.where(kept, y + gumbel(v), float("-inf"))
            item = tl.maximum(item, tl.max(tl.where(kept, packed(score, ids), LOWEST), 0))
            top = tl.maximum(top, tl.max(score, 0))
    return tl.sum(total, 0), tl.sum(before, 0), item


@triton.jit
def passes(lead, peak, least, share, total, before):
    """Whether min_p and top_p keep the candidate that so much mass stands before."""
    near = packed_number(lead) - peak >= least
    return near & ((before.to(tl.float64) < enough_of(share, total)) | (before == 0))


@triton.jit
def following(x_row, heat, item):
    """The next candidate: the token of the best score `item`, packed by its value."""
    token = packed_id(item)
    return packed(tempered(tl.load(x_row + token).to(tl.float32), heat), token.to(tl.int32))


@triton.jit
def judge_kernel(
    work, rows, positions, temperature, keys, log_min_p, state, lead, peak_of,
    totals, earlier, best,
    work_stride, float_stride, int_stride, size, part, num_parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row whose candidate is to be judged."""
    at = tl.program_id(0)
    index = tl.program_id(1)
    if tl.load(state + at) == VERIFY:
        row = tl.load(rows + at)
        heat = temperature_of(temperature, row, float_stride)
        least = tl.load(log_min_p + row * float_stride).to(tl.float32)
        word_0, word_1 = noise_words(tl.load(keys + row * int_stride), tl.load(positions + at))
        low = index * part
        total, before, item = judge_part(
            work + at.to(tl.int64) * work_stride, low, tl.minimum(low + part, size), heat,
            tl.load(peak_of + at), least, word_0, word_1, tl.load(lead + at), LOWEST, BLOCK,
        )  # fmt: skip
        out = at.to(tl.int64) * num_parts + index
        tl.store(totals + out, total)
        tl.store(earlier + out, before)
        tl.store(best + out, item)


@triton.jit
def settle_kernel(
    work, rows, temperature, top_p, log_min_p, state, lead, peak_of, totals, earlier, best, tokens,
    work_stride, float_stride, num_parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Accept a row's candidate, or name the next one."""
    at = tl.program_id(0)
    if tl.load(state + at) == VERIFY:
        row = tl.load(rows + at)
        parts = tl.arange(0, PARTS)
        here = parts < num_parts
        base = at.to(tl.int64) * num_parts
        total = tl.sum(tl.load(totals + base + parts, mask=here, other=0), 0)
        before = tl.sum(tl.load(earlier + base + parts, mask=here, other=0), 0)
        item = tl.max(tl.load(best + base + parts, mask=here, other=LOWEST), 0)
        candidate = tl.load(lead + at)
        share = tl.load(top_p + row * float_stride)
        least = tl.load(log_min_p + row * float_stride).to(tl.float32)
        ends = passes(candidate, tl.load(peak_of + at), least, share, total, before)
        if ends | (
            item == LOWEST
        ):  # a rejected candidate has one before it, or the rules are broken
            tl.store(tokens + at, packed_id(candidate))
            tl.store(state + at, DONE)
        else:
            heat = temperature_of(temperature, row, float_stride)
            tl.store(lead + at, following(work + at.to(tl.int64) * work_stride, heat, item))


@triton.jit
def count_from(x_row, size, heat, limit, BLOCK: tl.constexpr):
    """How many of a row's tokens are at or above a packed limit."""
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        takes = (packed(tempered(x, heat), ids) >= limit) & (ids < size)
        number += takes.to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def cut_after(x_row, size, heat, count, BLOCK: tl.constexpr):
    """The `count`-th of a row's tokens, packed: bit by bit the highest limit that so many reach."""
    limit = tl.full((), LOWEST, tl.int64)
    zero = tl.full((), 0, tl.int64)
    limit = tl.where(count_from(x_row, size, heat, zero, BLOCK) >= count, zero, limit)
    reached = count_from(x_row, size, heat, limit, BLOCK)
    bit = 62
    while (bit >= 0) & (reached != count):  # once nothing else reaches it, any lower bits will do
        higher = limit + (tl.full((), 1, tl.int64) << bit)
        number = count_from(x_row, size, heat, higher, BLOCK)
        limit = tl.where(number >= count, higher, limit)
        reached = tl.where(number >= count, number, reached)
        bit -= 1
    return limit


@triton.jit
def walk_kernel(
    work, rows, positions, temperature, keys, top_k, top_p, log_min_p, state, lead, peak_of, tokens,
    work_stride, float_stride, int_stride, size,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that are not done, alone, until they are."""
    at = tl.program_id(0)
    todo = tl.load(state + at)
    if todo != DONE:
        row = tl.load(rows + at)
        x_row = work + at.to(tl.int64) * work_stride
        heat = temperature_of(temperature, row, float_stride)
        peak = tl.load(peak_of + at)
        least = tl.load(log_min_p + row * float_stride).to(tl.float32)
        share = tl.load(top_p + row * float_stride)
        word_0, word_1 = noise_words(tl.load(keys + row * int_stride), tl.load(positions + at))
        cut = tl.full((), LOWEST, tl.int64)
        candidate = tl.load(lead + at)
        if TOP_K:
            if todo == WALK:
                count = tl.load(top_k + row * int_stride).to(tl.int32)
                cut = cut_after(x_row, size, heat, count, BLOCK)
                _total, _before, item = judge_part(
                    x_row, 0, size, heat, peak, least, word_0, word_1, cut - 1, cut, BLOCK
                )
                candidate = following(x_row, heat, item)
        going = tl.full((), 1, tl.int32)
        while going > 0:
            total, before, item = judge_part(
                x_row, 0, size, heat, peak, least, word_0, word_1, candidate, cut, BLOCK
            )
            ends = passes(candidate, peak, least, share, total, before)
            if ends | (item == LOWEST):  # whatever happens, a kernel must end
                going = going * 0
            else:
                candidate = following(x_row, heat, item)
        tl.store(tokens + at, packed_id(candidate))
