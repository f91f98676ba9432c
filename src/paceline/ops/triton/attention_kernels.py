"""Device code of `ops/triton/attention.py`, where its structure and its letters are explained.

Triton compiles these functions by their source: types are inferred, and what is `tl.constexpr` makes a
variant. Sizes that vary from step to step are exempt from that ("do_not_specialize").
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge(peak, total, acc, peak_2, total_2, acc_2):
    """Join two parts of a softmax: highest score, sum of weights, weighted values."""
    joint = tl.maximum(peak, peak_2)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    first = tl.exp2(peak - base)
    second = tl.exp2(peak_2 - base)
    acc = acc * tl.expand_dims(first, -1) + acc_2 * tl.expand_dims(second, -1)
    return joint, total * first + total_2 * second, acc


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
def _load_tile(base, offset, at_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Vectors at offsets [N, D]."""
    if DIM == BLOCK_D:
        return tl.load(base + offset)
    return tl.load(base + offset, mask=(at_d < DIM)[None, :], other=0.0)


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
    do_not_specialize=["num_rows", "num_tokens", "num_units", "packed", "window", "num_words",
        "page_stride", "mask_stride"],
    do_not_specialize_on_alignment=[
        "pages", "prefix_lens", "tail_lens", "cu_q", "positions", "mask",
    ],
)  # fmt: skip
def attend_kernel(
    q, k, v, out, partial, stats,
    pages, prefix_lens, tail_lens, cu_q, positions, mask,
    num_rows, num_tokens, num_units, packed, scale, window, num_words,
    q_t_stride, q_h_stride, kv_h_stride, kv_s_stride, out_t_stride, page_stride, mask_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row, key/value head and block of packed queries over one unit of keys, or over all."""
    blocks = tl.cdiv(packed, BLOCK_M)
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1)
    unit = tl.program_id(2)
    if (unit == 0) & (block == 0):
        dead = tl.load(cu_q + num_rows).to(tl.int32)
        _clear_dead(out, dead + row, num_tokens, num_rows, head, out_t_stride, GROUP, DIM, BLOCK_D)
    begin = tl.load(cu_q + row).to(tl.int32)
    count = tl.load(cu_q + row + 1).to(tl.int32) - begin
    if block * BLOCK_M >= count * GROUP:
        return
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    tail = tl.load(tail_lens + row).to(tl.int32)
    keys = prefix + tail
    row_units = tl.cdiv(keys, UNIT)
    if SPLIT:
        if unit >= row_units:
            return
        unit_stop = unit + 1
    else:
        unit_stop = row_units
    first = tail - count  # tail index of the row's first query

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
    position = tl.load(positions + token, mask=live, other=0).to(tl.int32)
    k_head = k + head.to(tl.int64) * kv_h_stride
    v_head = v + head.to(tl.int64) * kv_h_stride
    own_pages = pages + row.to(tl.int64) * page_stride

    reach = 0  # start of the first tile that any query's window holds, within the prefix
    if HAS_WINDOW:
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        reach = tl.minimum(tl.maximum(oldest, 0), prefix) // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at_unit in tl.range(unit, unit_stop, num_stages=1):
        low = at_unit * UNIT
        high = tl.minimum(low + UNIT, keys)
        u_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        u_total = tl.zeros([BLOCK_M], tl.float32)
        u_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        masked = tl.maximum(low, reach)
        if not HAS_WINDOW:
            # Tiles that everybody sees whole.
            masked = tl.maximum(low, tl.minimum(high, prefix) // BLOCK_N * BLOCK_N)
            # A tile's page ids are loaded a tile ahead, and shared by keys and values.
            ahead = low + tl.arange(0, BLOCK_N)
            page = tl.load(own_pages + ahead // PAGE, mask=ahead < masked, other=0)
            for at in tl.range(low, masked, BLOCK_N, num_stages=STAGES):
                place = at + tl.arange(0, BLOCK_N)
                slot = page.to(tl.int64) * PAGE + place % PAGE
                ahead = place + BLOCK_N
                page = tl.load(own_pages + ahead // PAGE, mask=ahead < masked, other=0)
                offset = slot[:, None] * kv_s_stride + at_d[None, :]
                k_tile = _load_tile(k_head, offset, at_d, DIM, BLOCK_D)
                v_tile = _load_tile(v_head, offset, at_d, DIM, BLOCK_D)
                scores = tl.dot(queries, tl.trans(k_tile))
                u_peak, u_total, u_acc = _add_tile(scores, v_tile, scale, u_peak, u_total, u_acc)
        for at in tl.range(masked, high, BLOCK_N, num_stages=1):
            place = at + tl.arange(0, BLOCK_N)
            bit = place - prefix
            if HAS_MASK:
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
            else:
                sees = bit[None, :] <= (first + query)[:, None]
            sees = sees & live[:, None] & (place < high)[None, :]
            if CAUSAL or HAS_WINDOW:
                own = bit - first  # the how-manieth query of the row a key is
                is_query = (own >= 0) & (place < high)
                key_at = tl.load(positions + begin + own, mask=is_query, other=0).to(tl.int32)
                key_at = tl.where(is_query, key_at, place)
                if CAUSAL:
                    past = (own < 0)[None, :] | (key_at[None, :] <= position[:, None])
                    sees = sees & past
                if HAS_WINDOW:
                    sees = sees & (key_at[None, :] > (position - window)[:, None])
            # What nobody sees is not read: stale slots hold anything, and 0 x NaN is NaN.
            seen = tl.max(sees.to(tl.int32), 0) > 0
            ids = tl.load(own_pages + place // PAGE, mask=seen, other=0)
            slot = ids.to(tl.int64) * PAGE + place % PAGE
            offset = slot[:, None] * kv_s_stride + at_d[None, :]
            there = seen[:, None] & (at_d < DIM)[None, :]
            k_tile = tl.load(k_head + offset, mask=there, other=0.0)
            v_tile = tl.load(v_head + offset, mask=there, other=0.0)
            scores = tl.where(sees, tl.dot(queries, tl.trans(k_tile)), float("-inf"))
            u_peak, u_total, u_acc = _add_tile(scores, v_tile, scale, u_peak, u_total, u_acc)
        peak, total, acc = _merge(peak, total, acc, u_peak, u_total, u_acc)

    in_out = live[:, None] & (at_d < DIM)[None, :]
    to = out + token[:, None] * out_t_stride + q_head[:, None] * DIM + at_d[None, :]
    if SPLIT:
        if row_units > 1:
            heads = tl.num_programs(1)
            at = ((row.to(tl.int64) * heads + head) * num_units + unit) * packed + at_m
            everything = num_rows.to(tl.int64) * heads * num_units * packed
            tl.store(stats + at, peak, mask=live)
            tl.store(stats + everything + at, total, mask=live)
            tl.store(partial + at[:, None] * DIM + at_d[None, :], acc, mask=in_out)
            return
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_out)


@triton.jit(
    do_not_specialize=["num_rows", "num_units", "packed"],
    do_not_specialize_on_alignment=["prefix_lens", "tail_lens", "cu_q"],
)
def join_kernel(
    partial, stats, out, prefix_lens, tail_lens, cu_q,
    num_rows, num_units, packed, out_t_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of some packed queries of a row: their units joined from left to right."""
    blocks = tl.cdiv(packed, BLOCK_M)
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1)
    begin = tl.load(cu_q + row).to(tl.int32)
    count = tl.load(cu_q + row + 1).to(tl.int32) - begin
    if block * BLOCK_M >= count * GROUP:
        return
    keys = (tl.load(prefix_lens + row) + tl.load(tail_lens + row)).to(tl.int32)
    row_units = tl.cdiv(keys, UNIT)
    if row_units <= 1:
        return  # written already
    at_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    at_d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    live = at_m < count * GROUP
    heads = tl.num_programs(1)
    at = (row.to(tl.int64) * heads + head) * num_units * packed + at_m
    everything = num_rows.to(tl.int64) * heads * num_units * packed
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for unit in range(0, row_units, UNITS):
        for i in tl.static_range(UNITS):  # unrolled: no load waits for another
            there = live & (unit + i < row_units)
            u_peak = tl.load(stats + at, mask=there, other=float("-inf"))
            u_total = tl.load(stats + everything + at, mask=there, other=0.0)
            values = partial + at[:, None] * DIM + at_d[None, :]
            u_acc = tl.load(values, mask=there[:, None], other=0.0)
            peak, total, acc = _merge(peak, total, acc, u_peak, u_total, u_acc)
            at += packed
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    token = (begin + at_m // GROUP).to(tl.int64)
    q_head = head * GROUP + at_m % GROUP
    to = out + token[:, None] * out_t_stride + q_head[:, None] * DIM + at_d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None])
