"""Device code of `ops/triton/walk.py`: how far each row goes, and what is kept of it.

One program a row; rows do not wait for one another. Letters are explained there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "spare", "k_b", "k_n", "p_b", "p_n", "l_stride"])
def judge_kernel(
    tokens, parents, node, cu_q, picks, rows, lens, live, stop_ids, limits,
    path, path_tokens, counts, next_token, alive,
    num_tokens, spare, k_b, k_n, p_b, p_n, l_stride,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, STOPS: tl.constexpr, NOT_FINITE: tl.constexpr,
):  # fmt: skip
    """Follow, from the root, the selected child that carries the target's token."""
    b = tl.program_id(0)
    begin = tl.load(cu_q + b)
    count = tl.load(cu_q + b + 1) - begin
    row = tl.load(rows + b).to(tl.int64)
    row = tl.where(row < 0, spare, row)
    length = tl.load(lens + b)
    limit = tl.load(limits + row * l_stride)
    stops = tl.load(stop_ids + row * STOPS + tl.arange(0, STOPS))
    at = tl.arange(0, BLOCK_N)
    here = (at < count) & (begin + at < num_tokens)
    own = tl.load(node + begin + at, mask=here, other=0) % WIDTH
    token = tl.load(tokens + b.to(tl.int64) * k_b + own * k_n, mask=here, other=-1)
    parent = tl.load(parents + b.to(tl.int64) * p_b + own * p_n, mask=here, other=-1)
    root = tl.load(tokens + b.to(tl.int64) * k_b)

    walked = tl.full([BLOCK_N], -1, tl.int64)
    spoken = tl.full([BLOCK_N], -1, tl.int64)
    where = tl.zeros([], tl.int64)  # place of the node we are at, among the row's selected
    steps = tl.zeros([], tl.int64)
    last = root
    goes_on = tl.zeros([], tl.int64)
    go = ((tl.load(live + row) != 0) & (count > 0)).to(tl.int64)
    while go > 0:
        pick = tl.load(picks + begin + where)
        walked = tl.where(at == steps, where, walked)
        spoken = tl.where(at == steps, tl.sum(tl.where(at == where, token, 0), 0), spoken)
        stop = tl.max((stops == pick).to(tl.int32), 0) > 0
        ends = stop | (length + steps + 2 >= limit) | (pick == NOT_FINITE)
        me = tl.sum(tl.where(at == where, own, 0), 0)
        match = here & (parent == me) & (token == pick) & (token >= 0)
        child = tl.min(tl.where(match, at, BLOCK_N), 0).to(tl.int64)
        steps += 1
        last = pick
        goes_on = tl.where(ends, 0, 1).to(tl.int64)
        go = tl.where(ends | (child >= BLOCK_N) | (steps >= WIDTH), 0, 1).to(tl.int64)
        where = tl.where(child >= BLOCK_N, where, child)
    out = b.to(tl.int64) * WIDTH + at
    tl.store(path + out, walked, mask=at < WIDTH)
    tl.store(path_tokens + out, spoken, mask=at < WIDTH)
    tl.store(counts + b, steps)
    tl.store(next_token + b, last)
    tl.store(alive + b, goes_on.to(tl.int8))


@triton.jit(do_not_specialize=["num_tokens", "spare", "width", "nodes", "s_b", "s_n"])
def advance_kernel(
    path, path_tokens, counts, next_token, alive, node, cu_q, tree_sources, rows,
    lens, tokens, live, emitted, sources, drafted,
    num_tokens, spare, width, nodes, s_b, s_n,
    BLOCK_A: tl.constexpr,
):  # fmt: skip
    """A row's own state after the step, and what the host wants to know of it."""
    b = tl.program_id(0)
    row = tl.load(rows + b).to(tl.int64)
    row = tl.where(row < 0, spare, row)
    count = tl.load(counts + b)
    newest = tl.load(next_token + b)
    # Padding rows are all the spare one, and change nothing of it: the order does not matter.
    tl.store(lens + row, tl.load(lens + row) + count, mask=count > 0)
    tl.store(tokens + row, tl.maximum(newest, 0), mask=count > 0)
    tl.store(live + row, tl.load(alive + b))
    begin = tl.load(cu_q + b)
    tl.store(drafted + b, tl.load(cu_q + b + 1) - begin - 1)
    at = tl.arange(0, BLOCK_A)
    here = at < width
    first = b.to(tl.int64) * width + at
    after = tl.load(path_tokens + first + 1, mask=at + 1 < width, other=-1)
    tl.store(emitted + first, tl.where(at == count - 1, newest, after), mask=here)
    place = tl.load(path + first, mask=here, other=-1)
    there = (place >= 0) & (begin + place < num_tokens)
    own = tl.load(node + begin + place, mask=there, other=0) % nodes
    source = tl.load(tree_sources + b.to(tl.int64) * s_b + own * s_n, mask=there, other=0)
    tl.store(sources + first, source, mask=here)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "spare", "width", "page_stride", "num_columns",
        "dummy"],
)  # fmt: skip
def compact_kernel(
    path, path_tokens, counts, emitted, cu_q, rows, lens, pages,
    cu, token_ids, next_ids, positions, slots, nodes,
    num_rows, num_tokens, spare, width, page_stride, num_columns, dummy,
    PAGE: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """Put a row's accepted path after those of the rows before it."""
    b = tl.program_id(0)
    at_b = tl.arange(0, BLOCK_B)
    every = tl.load(counts + at_b, mask=at_b < num_rows, other=0)
    begin = tl.sum(tl.where(at_b < b, every, 0), 0)
    count = tl.sum(tl.where(at_b == b, every, 0), 0)
    total = tl.sum(every, 0)
    tl.store(cu + b, begin)
    if b == num_rows - 1:
        tl.store(cu + num_rows, total)
    row = tl.load(rows + b).to(tl.int64)
    row = tl.where(row < 0, spare, row)
    at = tl.arange(0, BLOCK_A)
    here = (at < count) & (at < width) & (begin + at < num_tokens)
    first = b.to(tl.int64) * width + at
    to = begin + at
    place = tl.load(lens + b) + at
    page = tl.load(
        pages + row * page_stride + place // PAGE,
        mask=here & (place // PAGE < num_columns),
        other=dummy,
    )
    slot = tl.where(page == dummy, -1, page.to(tl.int64) * PAGE + place % PAGE)
    tl.store(token_ids + to, tl.load(path_tokens + first, mask=here, other=0), mask=here)
    after = tl.load(emitted + first, mask=here, other=0)
    tl.store(next_ids + to, tl.maximum(after, 0), mask=here)
    tl.store(positions + to, place, mask=here)
    tl.store(slots + to, slot, mask=here)
    selected = tl.load(cu_q + b) + tl.load(path + first, mask=here, other=0)
    tl.store(nodes + to, selected, mask=here)
    for start in range(b * DEAD, num_tokens, num_rows * DEAD):
        dead = start + tl.arange(0, DEAD)
        beyond = (dead >= total) & (dead < num_tokens)
        nothing = tl.zeros([DEAD], tl.int64)
        tl.store(token_ids + dead, nothing, mask=beyond)
        tl.store(next_ids + dead, nothing, mask=beyond)
        tl.store(positions + dead, nothing, mask=beyond)
        tl.store(slots + dead, nothing - 1, mask=beyond)
        tl.store(nodes + dead, nothing, mask=beyond)
