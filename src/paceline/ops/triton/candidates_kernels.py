"""Device code of `ops/triton/candidates.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.triton.pick_kernels import gumbel, noise_words, uniforms


@triton.jit
def _at_most_zero(x):
    """`clamp(max=0)`; what is no number stays none."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log_softmax(x, here):
    """Logarithms of softmax over the lanes that are `here`."""
    peak = tl.max(tl.where(here, x, float("-inf")), 0)
    total = tl.sum(tl.where(here, tl.exp(x - peak), 0.0), 0)
    return x - peak - tl.log(total)


@triton.jit(do_not_specialize=["positions", "t_stride", "l_kind", "l_at"])
def rank_kernel(
    top, ids, mass, noise, temperature, log, held, claimed,
    out_ids, out_scores, out_share, out_on, out_off,
    positions, t_stride, l_kind, l_at,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    """One position of one row: a candidate's rank is the number of those before it."""
    spot = tl.program_id(0).to(tl.int64)
    row = spot // positions
    position = spot % positions
    at = tl.arange(0, BLOCK)
    here = at < COUNT
    y = tl.load(top + spot * COUNT + at, mask=here, other=float("-inf"))
    token = tl.load(ids + spot * COUNT + at, mask=here, other=0)
    score = y
    if HAS_NOISE:
        score = y + tl.load(noise + spot * COUNT + at, mask=here, other=0.0).to(tl.float32)
    # What is no number comes first, as `sort` has it; a comparison with NaN is false.
    key = tl.where(score >= float("-inf"), score, float("inf"))
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNT, 16):
        other = start + tl.arange(0, 16)
        there = other < COUNT
        theirs = tl.load(top + spot * COUNT + other, mask=there, other=float("-inf"))
        token_2 = tl.load(ids + spot * COUNT + other, mask=there, other=0)
        if HAS_NOISE:
            extra = tl.load(noise + spot * COUNT + other, mask=there, other=0.0)
            theirs = theirs + extra.to(tl.float32)
        theirs = tl.where(theirs >= float("-inf"), theirs, float("inf"))
        equal = (theirs[None, :] == key[:, None]) & (token_2[None, :] < token[:, None])
        better = ((theirs[None, :] > key[:, None]) | equal) & there[None, :]
        rank += tl.sum(better.to(tl.int32), 1)

    heat = tl.load(temperature + row * t_stride).to(tl.float32)
    kind = tl.where(heat > 0, 2, 0).to(tl.int64)
    scale = tl.where(heat > 0, heat, 1.0)
    most = tl.max(y, 0)
    share = tl.log(tl.sum(tl.where(here, tl.exp(y - most), 0.0), 0)) + most
    share = _at_most_zero(share - tl.load(mass + spot))
    tl.store(out_share + spot, share)
    to = spot * COUNT + rank
    tl.store(out_ids + to, token, mask=here)
    tl.store(out_scores + to, score, mask=here)
    cell = kind * l_kind + position * l_at
    on = tl.exp(tl.load(log + cell)) * scale
    reach = tl.log(tl.load(held + cell) / tl.load(claimed + cell))
    weight = _log_softmax(score * on, here) + _at_most_zero(share + reach)
    tl.store(out_on + to, weight, mask=here)
    cell += l_kind
    off = tl.exp(tl.load(log + cell)) * scale
    reach = tl.log(tl.load(held + cell) / tl.load(claimed + cell))
    weight = _log_softmax(score * off, here) + _at_most_zero(share + reach)
    tl.store(out_off + to, weight, mask=here)


@triton.jit
def _into(sums, kind, values):
    """Add values [R] to sums [4] by kind [R]."""
    cell = tl.arange(0, 4)
    mine = kind[None, :] == cell[:, None]
    return sums + tl.sum(tl.where(mine, values[None, :], 0.0), 1)


@triton.jit
def _number(x):
    """x, 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit(do_not_specialize=["num_rows", "positions", "t_stride", "e_b", "l_kind", "l_at"])
def learn_kernel(
    ids, scores, share, temperature, emitted, log, information, held, claimed,
    kept, least, most, num_rows, positions, t_stride, e_b, l_kind, l_at,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One position of all rows: sums by kind and by what stands before, then the tables' new values."""
    position = tl.program_id(0)
    cell = tl.arange(0, 4)
    at_table = cell.to(tl.int64) * l_kind + position * l_at
    tables = tl.load(log + at_table)
    at = tl.arange(0, BLOCK)
    before = tl.arange(0, BLOCK_P)
    gradients = tl.zeros([4], tl.float32)
    gained = tl.zeros([4], tl.float32)
    seen = tl.zeros([4], tl.float32)
    counts = tl.zeros([4], tl.float32)
    claims = tl.zeros([4], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        there = row < num_rows
        # Whether the path left the spine before this position.
        earlier = there[:, None] & (before < position)[None, :]
        spots = row[:, None] * positions + before[None, :]
        best = tl.load(ids + spots * COUNT, mask=earlier, other=0)
        was = tl.load(emitted + row[:, None] * e_b + before[None, :], mask=earlier, other=0)
        off = tl.max((best != was).to(tl.int32), 1)
        heat = tl.load(temperature + row * t_stride, mask=there, other=0.0).to(tl.float32)
        kind = tl.where(heat > 0, 2, 0) + off
        sharp = tl.sum(tl.where(kind[:, None] == cell[None, :], tables[None, :], 0.0), 1)
        sharp = tl.exp(sharp) * tl.where(heat > 0, heat, 1.0)
        spot = row * positions + position
        both = there[:, None] & (at < COUNT)[None, :]
        flat = spot[:, None] * COUNT + at[None, :]
        score = tl.load(scores + flat, mask=both, other=0.0)
        token = tl.load(ids + flat, mask=both, other=-1)
        now = tl.load(emitted + row * e_b + position, mask=there, other=-1)
        x = score * sharp[:, None]
        peak = tl.max(tl.where(both, x, float("-inf")), 1)
        weight = tl.where(both, tl.exp(x - tl.where(there, peak, 0.0)[:, None]), 0.0)
        total = tl.sum(weight, 1)
        part = weight / tl.where(there, total, 1.0)[:, None]
        product = tl.where(both, part * x, 0.0)
        mean = tl.sum(product, 1)
        hit = both & (token == now[:, None])
        judged = there & (now >= 0)
        found = judged & (tl.max(hit.to(tl.int32), 1) > 0)
        gradient = tl.sum(tl.where(hit, x, 0.0), 1) - mean
        variance = tl.sum(tl.where(both, product * x, 0.0), 1) - mean * mean
        claim = tl.exp(tl.load(share + spot, mask=there, other=0.0))
        gradients = _into(gradients, kind, tl.where(found, _number(gradient), 0.0))
        gained = _into(gained, kind, tl.where(found, _number(variance), 0.0))
        seen = _into(seen, kind, tl.where(found, 1.0, 0.0))
        counts = _into(counts, kind, tl.where(judged, 1.0, 0.0))
        claims = _into(claims, kind, tl.where(judged, _number(claim), 0.0))
    keep = tl.exp(tl.log(kept) * counts)
    worth = tl.load(information + at_table) * keep + gained
    tl.store(information + at_table, worth)
    moved = tables + gradients / worth
    tl.store(log + at_table, tl.minimum(tl.maximum(moved, least), most))
    tl.store(held + at_table, tl.load(held + at_table) * keep + seen)
    tl.store(claimed + at_table, tl.load(claimed + at_table) * keep + claims)


@triton.jit(do_not_specialize=["ahead", "spare", "count", "k_stride", "t_stride", "p_stride"])
def noise_kernel(
    rows, positions, tokens, keys, temperature, out,
    ahead, spare, count, k_stride, t_stride, p_stride,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Noise of some tokens of one position; with AHEAD of one of `ahead` positions behind a row's newest."""
    spot = tl.program_id(0).to(tl.int64)
    if AHEAD:
        row = tl.load(rows + spot // ahead).to(tl.int64)
        row = tl.where(row < 0, spare, row)
        position = tl.load(positions + row * p_stride) + 1 + spot % ahead
    else:
        row = tl.load(rows + spot).to(tl.int64)
        row = tl.where(row < 0, spare, row)
        position = tl.load(positions + spot)
    word_0, word_1 = noise_words(tl.load(keys + row * k_stride), position)
    heat = tl.load(temperature + row * t_stride).to(tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < count
        token = tl.load(tokens + spot * count + at, mask=here, other=0).to(tl.int32)
        noise = gumbel(uniforms(token, word_0, word_1))
        tl.store(out + spot * count + at, tl.where(heat == 0, 0.0, noise), mask=here)
