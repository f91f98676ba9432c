"""Device code of `ops/triton/attention_invariant.py`, where its structure and its letters are explained.

One body of one loop multiplies every tile of every pass, whoever shares the program: what the compiler
makes of it is the same arithmetic for all. Sums and products that a compiler might fuse or not are written
as they are to be rounded. Sizes that vary from pass to pass make no variant ("do_not_specialize").
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge(peak, total, acc, peak_2, total_2, acc_2):
    """Join two parts of a softmax: highest score, sum of weights, weighted values.

    A part without a key changes no bit of the other.
    """
    joint = tl.maximum(peak, peak_2)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    first = tl.exp2(peak - base)
    second = tl.exp2(peak_2 - base)
    acc = tl.fma(acc, first[:, None], acc_2 * second[:, None])
    return joint, tl.fma(total, first, total_2 * second), acc


@triton.jit
def _write(
    out, acc, total, token, q_head, at_d, there, heads, DIM: tl.constexpr,
):  # fmt: skip
    """Weighted values [M, D] over the sums of their weights to out [T, Hq, D]."""
    to = out + (token * heads + q_head)[:, None] * DIM + at_d[None, :]
    whole = tl.where(total == 0.0, 1.0, total)
    mean = tl.div_rn(acc, tl.broadcast_to(whole[:, None], acc.shape))
    tl.store(to, mean.to(out.dtype.element_ty), mask=there)


@triton.jit(
    do_not_specialize=["num_pages", "page_stride", "mask_stride", "width"],
    do_not_specialize_on_alignment=[
        "mask",
        "cu_q",
        "prefix_lens",
        "pages",
        "nodes",
        "slots",
        "counts",
    ],
)
def paths_kernel(
    mask, cu_q, prefix_lens, pages, nodes, slots, counts, num_pages, page_stride, mask_stride, width,
    PAGE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """One query: the tail keys that it sees and their slots, in order, then -1; and how many there are."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    begin = tl.load(cu_q + row)
    if query >= tl.load(cu_q + row + 1) - begin:
        return
    token = begin + query
    node = tl.arange(0, NODES)
    inside = node < width
    word = tl.load(mask + token * mask_stride + node // 64, mask=inside, other=0)
    bit = ((word >> (node % 64).to(tl.int64)) & 1).to(tl.int32)
    count = tl.sum(bit, 0)
    rank = tl.cumsum(bit, 0) - 1
    place = tl.load(prefix_lens + row).to(tl.int32) + node
    in_page = place // PAGE
    own_pages = pages + row.to(tl.int64) * page_stride
    page = tl.load(own_pages + in_page, mask=(bit != 0) & (in_page < num_pages), other=0)
    to = token * width
    tl.store(nodes + to + rank, node, mask=bit != 0)
    tl.store(slots + to + rank, page * PAGE + place % PAGE, mask=bit != 0)
    none = tl.full([NODES], -1, tl.int32)
    tl.store(nodes + to + node, none, mask=inside & (node >= count))
    tl.store(slots + to + node, none, mask=inside & (node >= count))
    tl.store(counts + token, count)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "part_tiles", "joined_later", "num_pages", "blocks",
        "window", "has_paths", "width", "page_stride"],
    do_not_specialize_on_alignment=[
        "pages", "prefix_lens", "tail_lens", "cu_q", "positions", "nodes", "slots", "counts",
        "peaks", "totals",
    ],
)  # fmt: skip
def attend_kernel(
    q, k, v, out, partial, peaks, totals,
    pages, prefix_lens, tail_lens, cu_q, positions, nodes, slots, counts,
    num_rows, num_tokens, part_tiles, joined_later, num_pages, blocks, scale, window, has_paths, width,
    q_t_stride, q_h_stride, kv_h_stride, kv_s_stride, page_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, UNIT_TILES: tl.constexpr,
    STAGES: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Some queries of a row and a key/value head over some tiles: a unit, or all."""
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1)
    part = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    begin = tl.load(cu_q + row).to(tl.int32)
    count = tl.load(cu_q + row + 1).to(tl.int32) - begin
    prefix = tl.load(prefix_lens + row).to(tl.int32)
    tail = tl.load(tail_lens + row).to(tl.int32)
    at_d = tl.arange(0, BLOCK_D)
    if (part == tl.num_programs(2) - 1) & (block == 0):  # dead tokens: whoever has the least to do
        dead = tl.load(cu_q + num_rows).to(tl.int32)
        for token in range(dead + row, num_tokens, num_rows):
            for i in tl.static_range(GROUP):
                flat = tl.full([BLOCK_D], 0, tl.int64) + token
                to = out + (flat * heads + head * GROUP + i) * DIM + at_d
                tl.store(to, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=at_d < DIM)
    first_query = block * QUERIES
    if first_query >= count:
        return
    low = part * part_tiles
    if low * TILE >= prefix + tail:
        return

    at_m = tl.arange(0, BLOCK_M)
    turn_m = at_m // GROUP  # whose packed query it is, within the block
    query = first_query + turn_m
    live = (turn_m < QUERIES) & (query < count)
    token = (begin + query).to(tl.int64)
    q_head = head * GROUP + at_m % GROUP
    in_q = live[:, None] & (at_d < DIM)[None, :]
    queries = tl.load(
        q + token[:, None] * q_t_stride + q_head[:, None] * q_h_stride + at_d[None, :],
        mask=in_q,
        other=0.0,
    )
    # Keys of a query: the prefix, then those of the tail that it sees.
    in_path = tl.load(counts + token, mask=live & (has_paths != 0), other=0)
    limit = prefix + tl.where(has_paths != 0, in_path, tail - count + query + 1)
    limit = tl.where(live, limit, 0)
    longest = tl.max(limit, 0)
    end = tl.cdiv(longest, TILE)
    # Up to here a tile is the same for all queries of the block; from here on each has its own.
    alike = tl.where(has_paths != 0, prefix // TILE, end)
    bound = tl.where(has_paths != 0, prefix, longest)  # of a tile's keys, if it is the same for all
    high = tl.minimum(low + part_tiles, end)
    own_low = tl.maximum(alike, low)
    if CAUSAL or HAS_WINDOW:
        position = tl.load(positions + token, mask=live, other=0).to(tl.int32)
    if HAS_WINDOW:
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        reach = tl.minimum(tl.maximum(oldest, 0), prefix) // TILE
        low = tl.maximum(low, tl.minimum(reach, own_low))
    num_alike = tl.maximum(tl.minimum(alike, high) - low, 0)
    num_own = tl.maximum(high - own_low, 0)
    first_token = (begin + first_query).to(tl.int64)
    left = count - first_query  # queries from the block's first on
    own_pages = pages + row.to(tl.int64) * page_stride
    k_head = k + head.to(tl.int64) * kv_h_stride
    v_head = v + head.to(tl.int64) * kv_h_stride

    # Of the unit so far, and of the units before it.
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    all_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    all_total = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in tl.range(0, num_alike + num_own * QUERIES, num_stages=STAGES):
        # First the tiles that are the same for all, then each tile of each query in turn.
        is_own = step >= num_alike
        own_step = tl.maximum(step - num_alike, 0)
        turn = tl.where(is_own, own_step % QUERIES, QUERIES - 1)
        tile = tl.where(is_own, own_low + own_step // QUERIES, low + step)
        mine = live & ((turn_m == turn) | (step < num_alike))
        index = tile * TILE + tl.arange(0, TILE)  # in the list of a query's keys
        rank = index - prefix
        on_path = is_own & (rank >= 0)
        in_paths = (first_token + turn) * width + rank
        exists = on_path & (rank < width) & (turn < left)
        slot = tl.load(slots + in_paths, mask=exists, other=-1)
        inside = tl.where(on_path, slot >= 0, index < bound)
        in_page = index // PAGE
        page = tl.load(
            own_pages + in_page, mask=inside & (on_path == 0) & (in_page < num_pages), other=0
        )
        slot = tl.where(on_path, slot, page * PAGE + index % PAGE).to(tl.int64)
        sees = (index[None, :] < limit[:, None]) & mine[:, None] & inside[None, :]
        if CAUSAL or HAS_WINDOW:
            node = tl.load(nodes + in_paths, mask=exists, other=-1)
            place = tl.where(on_path, prefix + node, index)
            ahead = place - prefix - (tail - count)  # the how-manieth query of the row a key is
            is_query = inside & (ahead >= 0)
            key_at = tl.load(positions + begin + ahead, mask=is_query, other=0).to(tl.int32)
            key_at = tl.where(is_query, key_at, place)
            if CAUSAL:
                sees = sees & ((ahead < 0)[None, :] | (key_at[None, :] <= position[:, None]))
            if HAS_WINDOW:
                sees = sees & (key_at[None, :] > (position - window)[:, None])
            inside = tl.max(sees.to(tl.int32), 0) > 0  # of these, what somebody sees
        # What nobody sees is not read: stale slots hold anything, and 0 x NaN is NaN.
        offset = slot[:, None] * kv_s_stride + at_d[None, :]
        there = inside[:, None] & (at_d < DIM)[None, :]
        k_tile = tl.load(k_head + offset, mask=there, other=0.0)
        v_tile = tl.load(v_head + offset, mask=there, other=0.0)

        scores = tl.where(sees, tl.dot(queries, tl.trans(k_tile)), float("-inf"))
        joint = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = tl.where(joint == float("-inf"), 0.0, joint)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        keep = tl.exp2(peak - base)
        total = tl.fma(total, keep, tl.sum(weights, 1))
        added = tl.dot(weights.to(v_tile.dtype), v_tile, acc * keep[:, None])
        acc = tl.where(mine[:, None], added, acc)  # others' keys may hold NaN
        peak = joint

        ends = ((tile + 1) % UNIT_TILES == 0) & (turn == QUERIES - 1)
        new_peak, new_total, new_acc = _merge(all_peak, all_total, all_acc, peak, total, acc)
        all_peak = tl.where(ends, new_peak, all_peak)
        all_total = tl.where(ends, new_total, all_total)
        all_acc = tl.where(ends, new_acc, all_acc)
        peak = tl.where(ends, float("-inf"), peak)
        total = tl.where(ends, 0.0, total)
        acc = tl.where(ends, 0.0, acc)
    all_peak, all_total, all_acc = _merge(all_peak, all_total, all_acc, peak, total, acc)

    # One part is the whole of a row that has no second.
    if (joined_later != 0) & (part_tiles * TILE < prefix + tail):
        at = (part.to(tl.int64) * num_tokens + token) * heads + q_head
        tl.store(peaks + at, all_peak, mask=live)
        tl.store(totals + at, all_total, mask=live)
        tl.store(partial + at[:, None] * DIM + at_d[None, :], all_acc, mask=in_q)
    else:
        _write(out, all_acc, all_total, token, q_head, at_d, in_q, heads, DIM)


@triton.jit(
    do_not_specialize=["num_tokens", "part_tiles"],
    do_not_specialize_on_alignment=["prefix_lens", "tail_lens", "cu_q", "peaks", "totals"],
)
def join_kernel(
    partial, peaks, totals, out, prefix_lens, tail_lens, cu_q, num_tokens, part_tiles,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One query and key/value head: its units joined from left to right, as a program that has all does."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    head = tl.program_id(2)
    heads = tl.num_programs(2) * GROUP
    begin = tl.load(cu_q + row)
    if query >= tl.load(cu_q + row + 1) - begin:
        return
    keys = (tl.load(prefix_lens + row) + tl.load(tail_lens + row)).to(tl.int32)
    own_parts = tl.cdiv(keys, part_tiles * TILE)
    if own_parts <= 1:
        return  # written already
    at_g = tl.arange(0, BLOCK_G)
    at_d = tl.arange(0, BLOCK_D)
    live = at_g < GROUP
    there = live[:, None] & (at_d < DIM)[None, :]
    token = tl.full([BLOCK_G], 0, tl.int64) + begin + query
    q_head = head * GROUP + at_g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for part in tl.range(0, own_parts, PARTS, num_stages=1):
        for i in tl.static_range(PARTS):  # unrolled: no load waits for another
            exists = part + i < own_parts
            at = (tl.full([BLOCK_G], 0, tl.int64) + part + i) * num_tokens + token
            at = at * heads + q_head
            a_peak = tl.load(peaks + at, mask=live & exists, other=float("-inf"))
            a_total = tl.load(totals + at, mask=live & exists, other=0.0)
            values = partial + at[:, None] * DIM + at_d[None, :]
            a_acc = tl.load(values, mask=there & exists, other=0.0)
            peak, total, acc = _merge(peak, total, acc, a_peak, a_total, a_acc)
    _write(out, acc, total, token, q_head, at_d, there, heads, DIM)
