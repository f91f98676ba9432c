"""Device code of `ops/triton/tree.py`: which nodes are verified, and what the pass is told.

One program a row; of its nodes 16 are compared with all others at once. Rows before it are counted by every program itself, so nobody waits for anybody; where
one must, there is a kernel's end between them. Letters and the kernels' order are explained there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _counts(rows, caps, num_nodes, nodes_stride, at, num_rows):
    """How many nodes of rows `at` may be chosen: all that exist, within the row's cap."""
    here = at < num_rows
    row = tl.load(rows + at, mask=here, other=-1).to(tl.int64)
    cap = tl.load(caps + at, mask=here, other=-1).to(tl.int64)
    nodes = tl.load(num_nodes + at.to(tl.int64) * nodes_stride, mask=here, other=0).to(tl.int64)
    count = tl.minimum(nodes, cap + 1)
    return tl.where((row < 0) | (cap < 0) | (count < 0), 0, count)


@triton.jit
def _keys(scores, at, s_n, num_nodes):
    """Sort keys of a row's nodes `at`: the root before all, NaN and -inf last, then what is no node.

    -3e38 is below every finite score, and above what may not be chosen.
    """
    key = tl.load(scores + at.to(tl.int64) * s_n, mask=at < num_nodes, other=0.0).to(tl.float32)
    key = tl.where(key > -3.0e38, key, -3.0e38)  # a comparison with NaN is false
    key = tl.where(at == 0, float("inf"), key)
    return tl.where(at < num_nodes, key, float("-inf"))


@triton.jit
def _eligible(scores, s_n, num_nodes, count, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys [N] of a row's nodes, and which of them are its best `count`."""
    at = tl.arange(0, BLOCK_N)
    key = _keys(scores, at, s_n, num_nodes)
    eligible = at < count  # the order of the nodes, where all of them may be chosen
    if count < num_nodes:
        rank = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, WIDTH, 16):
            other = start + tl.arange(0, 16)
            theirs = _keys(scores, other, s_n, num_nodes)
            equal = (theirs[None, :] == key[:, None]) & (other[None, :] < at[:, None])
            better = (theirs[None, :] > key[:, None]) | equal
            rank += tl.sum(better.to(tl.int32), 1)
        eligible = (at < num_nodes) & (rank < count)
    return key, eligible


@triton.jit(do_not_specialize=["num_rows", "s_b", "s_n", "nodes_stride"])
def eligible_kernel(
    scores, num_nodes, rows, caps, keys,
    num_rows, s_b, s_n, nodes_stride,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys of a row's nodes; -inf where a node doesn't exist or lies beyond the row's cap."""
    row = tl.program_id(0)
    count = _counts(rows, caps, num_nodes, nodes_stride, row, num_rows)
    nodes = tl.load(num_nodes + row.to(tl.int64) * nodes_stride).to(tl.int64)
    own = scores + row.to(tl.int64) * s_b
    key, eligible = _eligible(own, s_n, nodes, count, WIDTH, BLOCK_N)
    at = tl.arange(0, BLOCK_N)
    key = tl.where(eligible, key, float("-inf"))
    tl.store(keys + row.to(tl.int64) * WIDTH + at, key, mask=at < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def choose_kernel(
    keys, chosen, kept,
    num_rows, num_tokens,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Which of a row's nodes are among the batch's best T: those that fewer than T others precede."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK_N)
    first = row.to(tl.int64) * WIDTH
    here = at < WIDTH
    key = tl.load(keys + first + at, mask=here, other=float("-inf"))
    everything = num_rows.to(tl.int64) * WIDTH
    rank = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, num_rows * WIDTH, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        theirs = tl.load(keys + other, mask=other < everything, other=float("-inf"))
        equal = (theirs[None, :] == key[:, None]) & (other[None, :] < (first + at)[:, None])
        better = (theirs[None, :] > key[:, None]) | equal
        rank += tl.sum(better.to(tl.int32), 1)
    taken = here & (key > float("-inf")) & (rank < num_tokens)
    tl.store(chosen + first + at, taken.to(tl.int8), mask=here)
    tl.store(kept + row, tl.sum(taken.to(tl.int64), 0))


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "s_b", "s_n", "m_b", "m_n", "m_w", "nodes_stride"],
)
def place_kernel(
    scores, num_nodes, mask, rows, caps, chosen, kept, node, cu_q, out,
    num_rows, num_tokens, s_b, s_n, m_b, m_n, m_w, nodes_stride,
    CUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """Put a row's chosen nodes side by side, after those of the rows before it, with renumbered masks.

    CUT: `choose_kernel` said which; else all that the caps allow are chosen.
    """
    row = tl.program_id(0)
    at_b = tl.arange(0, BLOCK_B)
    at = tl.arange(0, BLOCK_N)
    here = at < WIDTH
    if CUT:
        counts = tl.load(kept + at_b, mask=at_b < num_rows, other=0)
        taken = tl.load(chosen + row.to(tl.int64) * WIDTH + at, mask=here, other=0) != 0
    else:
        counts = _counts(rows, caps, num_nodes, nodes_stride, at_b, num_rows)
        own = tl.sum(tl.where(at_b == row, counts, 0), 0)
        nodes = tl.load(num_nodes + row.to(tl.int64) * nodes_stride).to(tl.int64)
        own_scores = scores + row.to(tl.int64) * s_b
        _, taken = _eligible(own_scores, s_n, nodes, own, WIDTH, BLOCK_N)
    begin = tl.sum(tl.where(at_b < row, counts, 0), 0)
    count = tl.sum(tl.where(at_b == row, counts, 0), 0)
    total = tl.sum(counts, 0)
    tl.store(cu_q + row, begin)
    if row == num_rows - 1:
        tl.store(cu_q + num_rows, total)
    place = begin + tl.cumsum(taken.to(tl.int64), 0) - 1
    fits = taken & (place < num_tokens)
    tl.store(node + place, row.to(tl.int64) * WIDTH + at, mask=fits)

    words = mask + row.to(tl.int64) * m_b
    last = tl.max(tl.where(taken, at, -1), 0)
    if last < count:  # the row's first nodes: their bits stay where they are
        for word in tl.static_range(WORDS):
            bits = tl.load(words + at.to(tl.int64) * m_n + word * m_w, mask=fits, other=0)
            tl.store(out + place * WORDS + word, bits, mask=fits)
    else:
        for word in tl.static_range(WORDS):
            new = tl.zeros([BLOCK_N], tl.int64)
            for start in range(0, WIDTH, 16):
                column = start + tl.arange(0, 16)
                before = taken[:, None] & (at[:, None] < column[None, :])
                to = tl.sum(before.to(tl.int64), 0)  # the column's number among the chosen
                kept_column = tl.sum(
                    (taken[:, None] & (at[:, None] == column[None, :])).to(tl.int32), 0
                )
                # Columns of 16 lie in one word of 64.
                old = tl.load(
                    words + at.to(tl.int64) * m_n + (start // 64) * m_w, mask=fits, other=0
                )
                bit = (old[:, None] >> (column % 64).to(tl.int64)[None, :]) & 1
                moved = bit << (to % 64)[None, :]
                counts_here = (kept_column > 0) & (to // 64 == word)
                new += tl.sum(tl.where(counts_here[None, :], moved, 0), 1)
            tl.store(out + place * WORDS + word, new, mask=fits)

    for start in range(row * DEAD, num_tokens, num_rows * DEAD):  # what nobody chose
        dead = start + tl.arange(0, DEAD)
        beyond = (dead >= total) & (dead < num_tokens)
        tl.store(node + dead, tl.full([DEAD], -1, tl.int64), mask=beyond)
        for word in tl.static_range(WORDS):
            tl.store(out + dead * WORDS + word, tl.zeros([DEAD], tl.int64), mask=beyond)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "spare", "page_stride", "num_columns", "dummy",
        "k_b", "k_n", "d_b", "d_n"],
)  # fmt: skip
def inputs_kernel(
    tokens, depths, node, cu_q, rows, lens, pages,
    token_ids, positions, slots, prefix_lens, tail_lens, table,
    num_rows, num_tokens, spare, page_stride, num_columns, num_pages, dummy, k_b, k_n, d_b, d_n,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """Token, position and slot of a row's selected nodes; its lengths and its pages."""
    b = tl.program_id(0)
    begin = tl.load(cu_q + b)
    count = tl.load(cu_q + b + 1) - begin
    total = tl.load(cu_q + num_rows)
    row = tl.load(rows + b).to(tl.int64)
    row = tl.where(row < 0, spare, row)
    length = tl.load(lens + row)
    tl.store(prefix_lens + b, length)
    tl.store(tail_lens + b, count)
    own_pages = pages + row * page_stride
    at = tl.arange(0, BLOCK_N)
    live = (at < count) & (begin + at < num_tokens)
    flat = tl.load(node + begin + at, mask=live, other=0)
    own = flat % WIDTH
    token = tl.load(tokens + b.to(tl.int64) * k_b + own * k_n, mask=live, other=0)
    depth = tl.load(depths + b.to(tl.int64) * d_b + own * d_n, mask=live, other=0)
    place = length + at
    page = tl.load(
        own_pages + place // PAGE, mask=live & (place // PAGE < num_columns), other=dummy
    )
    slot = tl.where(page == dummy, -1, page.to(tl.int64) * PAGE + place % PAGE)
    tl.store(token_ids + begin + at, token, mask=live)
    tl.store(positions + begin + at, length + depth, mask=live)
    tl.store(slots + begin + at, slot, mask=live)
    for start in range(0, num_pages, DEAD):
        column = start + tl.arange(0, DEAD)
        ids = tl.load(own_pages + column, mask=column < num_pages, other=0)
        tl.store(table + b.to(tl.int64) * num_pages + column, ids, mask=column < num_pages)
    for start in range(b * DEAD, num_tokens, num_rows * DEAD):
        dead = start + tl.arange(0, DEAD)
        beyond = (dead >= total) & (dead < num_tokens)
        nothing = tl.zeros([DEAD], tl.int64)
        tl.store(token_ids + dead, nothing, mask=beyond)
        tl.store(positions + dead, nothing, mask=beyond)
        tl.store(slots + dead, nothing - 1, mask=beyond)


@triton.jit(do_not_specialize=["num_tokens", "spare", "d_b", "d_n", "p_stride"])
def pick_places_kernel(
    depths, node, rows, lens, prompt_lens, owners, positions, outputs,
    num_tokens, spare, d_b, d_n, p_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row, position and number of output tokens of each selected node's pick."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < num_tokens
    flat = tl.load(node + at, mask=here, other=-1)
    dead = flat < 0
    flat = tl.where(dead, 0, flat)
    b = flat // WIDTH
    row = tl.load(rows + b, mask=here, other=0).to(tl.int64)
    row = tl.where(dead | (row < 0), spare, row)
    depth = tl.load(depths + b * d_b + flat % WIDTH * d_n, mask=here, other=0)
    position = tl.load(lens + b, mask=here, other=0) + depth + 1
    prompt = tl.load(prompt_lens + row * p_stride, mask=here, other=0)
    tl.store(owners + at, row, mask=here)
    tl.store(positions + at, position, mask=here)
    tl.store(outputs + at, position - prompt, mask=here)


@triton.jit(
    do_not_specialize=["num_rows", "spare", "page_stride", "num_columns", "num_pages", "dummy", "width",
        "offset", "ahead", "tail"],
)  # fmt: skip
def draft_inputs_kernel(
    rows, lens, pages, positions, slots, prefix_lens, cu_q, tail_lens, table,
    num_rows, spare, page_stride, num_columns, num_pages, dummy, width, offset, ahead, tail,
    AHEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Positions and slots of a row's queries in a drafter's pass; its lengths and its pages."""
    b = tl.program_id(0)
    row = tl.load(rows + b).to(tl.int64)
    row = tl.where(row < 0, spare, row)
    length = tl.load(lens + row)
    first = tl.maximum(length + offset, 0)
    tl.store(prefix_lens + b, first + width - tail)
    tl.store(tail_lens + b, tail)
    tl.store(cu_q + b, b * width)
    if b == num_rows - 1:
        tl.store(cu_q + num_rows, num_rows * width)
    own_pages = pages + row * page_stride
    at = tl.arange(0, BLOCK)
    here = at < width
    place = first + at
    page = tl.load(
        own_pages + place // PAGE, mask=here & (place // PAGE < num_columns), other=dummy
    )
    slot = tl.where(page == dummy, -1, page.to(tl.int64) * PAGE + place % PAGE)
    to = b.to(tl.int64) * width + at
    tl.store(slots + to, slot, mask=here)
    position = place
    if AHEAD:
        position = length + ahead + tl.zeros([BLOCK], tl.int64)
    tl.store(positions + to, position, mask=here)
    for start in range(0, num_pages, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        ids = tl.load(own_pages + column, mask=column < num_pages, other=0)
        tl.store(table + b.to(tl.int64) * num_pages + column, ids, mask=column < num_pages)
