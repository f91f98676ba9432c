"""Device code of `ops/triton/attention.py`, where its structure and its letters are explained.

Triton compiles these functions by their source: types are inferred, and what is `tl.constexpr` makes a
variant. Sizes that vary from step to step are exempt from that ("do_not_specialize").
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.triton.overlap_kernels import follow, release


@triton.jit
def _units(
    partial, stats, at, at_d, live, here, unit, units, everything, packed,
    DIM: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Peaks, then totals, then weighted values of some units; of one that is not there they add nothing."""
    peaks, totals, accs = (), (), ()
    for i in tl.static_range(UNITS):
        own = at + (unit + i) * packed
        there = live & (unit + i < units)
        # Past the first-level cache, which may hold what lay there before.
        peak = tl.load(stats + own, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(stats + everything + own, mask=there, other=0.0, cache_modifier=".cg")
        values = partial + own[:, None] * DIM + at_d[None, :]
        acc = tl.load(values, mask=here & (unit + i < units), other=0.0, cache_modifier=".cg")
        peaks, totals, accs = peaks + (peak,), totals + (total,), accs + (acc,)  # noqa: RUF005
    return peaks + totals + accs


@triton.jit
def _join(
    out, partial, stats, at_m, at_d, first_token, count, head, at, everything, units, packed,
    out_t_stride, GROUP: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Join the units of packed queries `at_m` from left to right and write columns `at_d`.

    The highest score of all comes first, so that a sum is one product a unit, and no load of a unit
    waits for another's. Rounded as written, whatever is compiled around it: two kernels must agree on
    every bit.
    """
    live = at_m < count * GROUP
    here = live[:, None] & (at_d < DIM)[None, :]
    at = at + at_m
    loaded = _units(
        partial, stats, at, at_d, live, here, 0, units, everything, packed, DIM, UNITS
    )  # fmt: skip
    highest = tl.full([at_m.shape[0]], float("-inf"), tl.float32)
    for i in tl.static_range(UNITS):
        highest = tl.maximum(highest, loaded[i])
    for unit in tl.range(UNITS, units, 32, num_stages=1):
        others = unit + tl.arange(0, 32)
        there = live[:, None] & (others < units)[None, :]
        peaks = stats + at[:, None] + others[None, :] * packed
        peaks = tl.load(peaks, mask=there, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, tl.max(peaks, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([at_m.shape[0]], tl.float32)
    acc = tl.zeros([at_m.shape[0], at_d.shape[0]], tl.float32)
    for i in tl.static_range(UNITS):
        weight = tl.exp2(loaded[i] - base)
        total = tl.fma(loaded[UNITS + i], weight, total)
        acc = tl.fma(loaded[2 * UNITS + i], weight[:, None], acc)
    for unit in tl.range(UNITS, units, UNITS, num_stages=1):
        more = _units(
            partial, stats, at, at_d, live, here, unit, units, everything, packed, DIM, UNITS
        )  # fmt: skip
        for i in tl.static_range(UNITS):
            weight = tl.exp2(more[i] - base)
            total = tl.fma(more[UNITS + i], weight, total)
            acc = tl.fma(more[2 * UNITS + i], weight[:, None], acc)
    acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    token = (first_token + at_m // GROUP).to(tl.int64)
    q_head = head * GROUP + at_m % GROUP
    to = out + token[:, None] * out_t_stride + q_head[:, None] * DIM + at_d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=here)


@triton.jit
def _add_tile(scores, v, scale, peak, total, acc):
    """Add a tile of keys to a running softmax; scores [M, N] are unscaled, -inf where hidden."""
    joint = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    weights = tl.exp2(scores * scale - base[:, None])
    keep = tl.exp2(peak - base)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None])
    return joint, total, acc


@triton.jit
def _page_ids(own_pages, at, num_pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the places of a tile that begins at a multiple of its length."""
    at_n = tl.arange(0, BLOCK_N)
    # Where a tile begins with a page, all but one number is the same for every tile.
    in_page = at // PAGE + at_n // PAGE if BLOCK_N % PAGE == 0 else (at + at_n) // PAGE
    return tl.load(own_pages + in_page, mask=in_page < num_pages, other=0)


@triton.jit
def _offsets(page, at, at_d, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr):
    """Where the tile's vectors lie [N, D], from their page ids."""
    at_n = tl.arange(0, BLOCK_N)
    inner = at_n % PAGE if BLOCK_N % PAGE == 0 else (at + at_n) % PAGE
    return page.to(tl.int64)[:, None] * (PAGE * DIM) + (inner[:, None] * DIM + at_d[None, :])


@triton.jit
def _in_word(own_bits, bit):
    """Whether queries of these bits see tail keys `bit`, of which all below 0 are the prefix."""
    shift = tl.minimum(tl.maximum(bit, 0), 63).to(tl.int64)
    return (((own_bits[:, None] >> shift[None, :]) & 1) != 0) | (bit < 0)[None, :]


@triton.jit
def _row_units(keys, unit_keys, least):
    """Units of a row: a last one of fewer than `least` keys belongs to the one before."""
    return tl.maximum(tl.cdiv(keys - least + 1, unit_keys), 1)


@triton.jit
def _clear_dead(
    out, start, stop, step, head, t_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zeros for every step-th token from start on, in the query heads of a key/value head."""
    at_d = tl.arange(0, BLOCK_D)
    for token in range(start, stop, step):
        for i in tl.static_range(GROUP):
            at = out + t_stride.to(tl.int64) * token + (head * GROUP + i) * DIM + at_d
            tl.store(at, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=at_d < DIM)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_units", "unit_keys", "least", "packed", "num_pages",
        "window", "num_words", "page_stride", "mask_stride"],
    do_not_specialize_on_alignment=[
        "pages", "prefix_lens", "tail_lens", "cu_q", "positions", "mask", "stats", "arrivals",
    ],
)  # fmt: skip
def attend_kernel(
    q, k, v, out, partial, stats, arrivals,
    pages, prefix_lens, tail_lens, cu_q, positions, mask,
    num_rows, num_tokens, num_units, unit_keys, least, packed, num_pages, scale, window, num_words,
    q_t_stride, q_h_stride, kv_h_stride, out_t_stride, page_stride, mask_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr,
    LAST_JOINS: tl.constexpr, JOIN_M: tl.constexpr, JOIN_UNITS: tl.constexpr,
    HAS_MASK: tl.constexpr, ONE_WORD: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row, key/value head and block of packed queries over one unit of keys."""
    follow(OVERLAPS)
    blocks = tl.cdiv(packed, BLOCK_M)
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1)
    unit = tl.program_id(2)
    # None of these loads waits for another; page ids beyond the row's keys are read, but not used.
    begin = tl.load(cu_q + row).to(tl.int32)
    count = tl.load(cu_q + row + 1).to(tl.int32) - begin
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    tail = tl.load(tail_lens + row).to(tl.int32)
    own_pages = pages + row.to(tl.int64) * page_stride
    low = unit * unit_keys
    page = _page_ids(own_pages, low, num_pages, PAGE, BLOCK_N)
    if (unit == num_units - 1) & (block == 0):  # whoever has the least to do
        dead = tl.load(cu_q + num_rows).to(tl.int32)
        _clear_dead(out, dead + row, num_tokens, num_rows, head, out_t_stride, GROUP, DIM, BLOCK_D)
    if block * BLOCK_M >= count * GROUP:
        return
    keys = prefix + tail
    row_units = _row_units(keys, unit_keys, least)
    if unit >= row_units:
        return
    first = tail - count  # tail index of the row's first query
    high = tl.where(unit == row_units - 1, keys, low + unit_keys)

    at_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    at_d = tl.arange(0, BLOCK_D)
    live = at_m < count * GROUP
    query = at_m // GROUP
    token = (begin + query).to(tl.int64)
    q_head = head * GROUP + at_m % GROUP
    queries = tl.load(
        q + token[:, None] * q_t_stride + q_head[:, None] * q_h_stride + at_d[None, :],
        mask=live[:, None] & (at_d < DIM)[None, :],
        other=0.0,
    )
    if ONE_WORD:  # the whole tail's bits; nobody's are those of a dead query
        own_bits = tl.load(mask + token * mask_stride, mask=live, other=0)
    if CAUSAL or HAS_WINDOW:
        position = tl.load(positions + token, mask=live, other=0).to(tl.int32)
    k_head = k + head.to(tl.int64) * kv_h_stride
    v_head = v + head.to(tl.int64) * kv_h_stride

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_WINDOW:
        # From the first tile that any query's window holds, within the prefix.
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        reach = tl.minimum(tl.maximum(oldest, 0), prefix) // BLOCK_N * BLOCK_N
        rest = tl.maximum(low, reach)
        page = _page_ids(own_pages, rest, num_pages, PAGE, BLOCK_N)
    else:
        # Tiles of keys which somebody sees: up to the tail's, which `BITS` shows who sees.
        rest = tl.maximum(low, tl.minimum(high, prefix) // BLOCK_N * BLOCK_N)
        if BITS:
            # Queries see themselves; earlier tail keys, if any, may be seen by nobody.
            rest = tl.where((first == 0) | (not ONE_WORD), high, rest)
        for at in tl.range(low, rest, BLOCK_N, num_stages=STAGES):
            offset = _offsets(page, at, at_d, PAGE, BLOCK_N, DIM)
            # A tile's page ids are loaded a tile ahead, and shared by keys and values.
            page = _page_ids(own_pages, at + BLOCK_N, num_pages, PAGE, BLOCK_N)
            place = at + tl.arange(0, BLOCK_N)
            if BITS:
                there = (place < high)[:, None] & (at_d < DIM)[None, :]
                k_tile = tl.load(k_head + offset, mask=there, other=0.0)
                v_tile = tl.load(v_head + offset, mask=there, other=0.0)
            elif DIM == BLOCK_D:
                k_tile = tl.load(k_head + offset)
                v_tile = tl.load(v_head + offset)
            else:
                there = tl.broadcast_to((at_d < DIM)[None, :], [BLOCK_N, BLOCK_D])
                k_tile = tl.load(k_head + offset, mask=there, other=0.0)
                v_tile = tl.load(v_head + offset, mask=there, other=0.0)
            scores = tl.dot(queries, tl.trans(k_tile))
            if BITS:
                if at + BLOCK_N > prefix:
                    bit = place - prefix
                    if ONE_WORD:
                        sees = _in_word(own_bits, bit)
                    else:
                        sees = bit[None, :] <= (first + query)[:, None]
                    scores = tl.where(sees & (place < high)[None, :], scores, float("-inf"))
            peak, total, acc = _add_tile(scores, v_tile, scale, peak, total, acc)
    for at in tl.range(rest, high, BLOCK_N, num_stages=1):
        place = at + tl.arange(0, BLOCK_N)
        inside = place < high
        offset = _offsets(page, at, at_d, PAGE, BLOCK_N, DIM)
        there = inside[:, None] & (at_d < DIM)[None, :]
        k_tile = tl.load(k_head + offset, mask=there, other=0.0)
        v_tile = tl.load(v_head + offset, mask=there, other=0.0)
        page = _page_ids(own_pages, at + BLOCK_N, num_pages, PAGE, BLOCK_N)
        bit = place - prefix
        if ONE_WORD:
            sees = _in_word(own_bits, bit) & inside[None, :]
        elif HAS_MASK:
            sees = tl.broadcast_to((bit < 0)[None, :], [BLOCK_M, BLOCK_N])
            lowest = tl.maximum(at - prefix, 0) // 32
            for i in tl.static_range(BLOCK_N // 32 + 1):
                word = tl.load(
                    mask + token * mask_stride + lowest + i,
                    mask=live & (lowest + i < num_words),
                    other=0,
                )
                has = (word[:, None] >> (bit & 31)[None, :]) & 1
                sees = sees | (((bit >> 5) == lowest + i)[None, :] & (has != 0))
            sees = sees & inside[None, :]
        else:
            sees = (bit[None, :] <= (first + query)[:, None]) & inside[None, :]
        if CAUSAL or HAS_WINDOW:
            own = bit - first  # the how-manieth query of the row a key is
            is_query = (own >= 0) & inside
            key_at = tl.load(positions + begin + own, mask=is_query, other=0).to(tl.int32)
            key_at = tl.where(is_query, key_at, place)
            if CAUSAL:
                past = (own < 0)[None, :] | (key_at[None, :] <= position[:, None])
                sees = sees & past
            if HAS_WINDOW:
                sees = sees & (key_at[None, :] > (position - window)[:, None]) & live[:, None]
        # What nobody sees counts as zeros: stale slots hold anything, and 0 x NaN is NaN.
        seen = tl.max(sees.to(tl.int32), 0) > 0
        v_tile = tl.where(seen[:, None], v_tile, tl.zeros_like(v_tile))
        scores = tl.where(sees, tl.dot(queries, tl.trans(k_tile)), float("-inf"))
        peak, total, acc = _add_tile(scores, v_tile, scale, peak, total, acc)

    release(OVERLAPS)
    in_out = live[:, None] & (at_d < DIM)[None, :]
    if row_units > 1:
        heads = tl.num_programs(1)
        row_at = (row.to(tl.int64) * heads + head) * num_units * packed
        everything = num_rows.to(tl.int64) * heads * num_units * packed
        own_at = row_at + unit * packed + at_m
        tl.store(stats + own_at, peak, mask=live)
        tl.store(stats + everything + own_at, total, mask=live)
        tl.store(partial + own_at[:, None] * DIM + at_d[None, :], acc, mask=in_out)
        if LAST_JOINS:
            # Every thread's numbers are there before one thread says so, and whoever is told that it
            # is the last to arrive sees those of all others.
            tl.debug_barrier()
            arrival = arrivals + (row * heads + head) * blocks + block
            others = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if others == row_units - 1:
                tl.store(arrival, 0)  # as the next pass, or replay, expects it
                stop = tl.minimum((block + 1) * BLOCK_M, count * GROUP)
                for m in tl.range(block * BLOCK_M, stop, JOIN_M, num_stages=1):
                    _join(
                        out, partial, stats, m + tl.arange(0, JOIN_M), at_d, begin, count, head, row_at,
                        everything, row_units, packed, out_t_stride, GROUP, DIM, JOIN_UNITS,
                    )  # fmt: skip
    else:
        to = out + token[:, None] * out_t_stride + q_head[:, None] * DIM + at_d[None, :]
        acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=in_out)


@triton.jit(
    do_not_specialize=["num_rows", "num_units", "unit_keys", "least", "packed"],
    do_not_specialize_on_alignment=["prefix_lens", "tail_lens", "cu_q", "stats"],
)
def join_kernel(
    partial, stats, out, prefix_lens, tail_lens, cu_q,
    num_rows, num_units, unit_keys, least, packed, out_t_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some columns of some packed queries of a row: their units joined from left to right."""
    follow(OVERLAPS)
    blocks = tl.cdiv(packed, BLOCK_M)
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1)
    begin = tl.load(cu_q + row).to(tl.int32)
    count = tl.load(cu_q + row + 1).to(tl.int32) - begin
    if block * BLOCK_M >= count * GROUP:
        return
    keys = (tl.load(prefix_lens + row) + tl.load(tail_lens + row)).to(tl.int32)
    row_units = _row_units(keys, unit_keys, least)
    if row_units <= 1:
        return  # written already
    heads = tl.num_programs(1)
    _join(
        out, partial, stats, block * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), begin, count, head,
        (row.to(tl.int64) * heads + head) * num_units * packed,
        num_rows.to(tl.int64) * heads * num_units * packed,
        row_units, packed, out_t_stride, GROUP, DIM, UNITS,
    )  # fmt: skip
