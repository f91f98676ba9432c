"""Device code of `ops/triton/growth.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gain(on, off, at, there, beside):
    """Log survival, at most 0, of a candidate: on the spine, or beside it."""
    after_spine = tl.load(on + at, mask=there & (beside == 0), other=float("-inf"))
    after_other = tl.load(off + at, mask=there & (beside != 0), other=float("-inf"))
    gain = tl.where(beside != 0, after_other, after_spine).to(tl.float64)
    return tl.where(gain >= float("-inf"), tl.minimum(gain, 0.0), float("-inf"))  # NaN: none


@triton.jit
def _entry(depth, beside, parent):
    """What decides between equal scores, as one number: depth, spine first, parent, rank (here 0)."""
    return ((depth * 2 + beside) * 1024 + parent) * 1024


@triton.jit(do_not_specialize=["positions", "count", "width", "nodes", "source"])
def grow_kernel(
    roots, ids, on, off, token_ids, parents, depths, mask, scores, sources, num_nodes,
    positions, count, width, nodes, source,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One row's tree: take the best prefix, put its sibling and its first child in line, and so on.

    Slot i of the line is for the first child of node i, then for that child's siblings one by one.
    """
    b = tl.program_id(0).to(tl.int64)
    base = b * positions * count
    first = b * nodes
    slot = tl.arange(0, BLOCK)
    none = tl.full([BLOCK], float("-inf"), tl.float64)
    zero = tl.zeros([], tl.int64)
    start = _gain(on, off, base, count > 0, zero)
    line = tl.where(slot == 0, start, none)  # score of each slot's prefix
    above = tl.zeros([BLOCK], tl.float64)  # of its parent
    entry = tl.zeros([BLOCK], tl.int64)
    best = start
    made = zero + 1
    go = ((best > float("-inf")) & (made < nodes)).to(tl.int64)
    while go > 0:
        chosen = tl.min(tl.where(line == best, entry, 4611686018427387904), 0)
        mine = (entry == chosen) & (line == best)
        up = tl.sum(tl.where(mine, above, 0.0), 0)
        rank = chosen % 1024
        parent = (chosen // 1024) % 1024
        beside = (chosen // 1048576) % 2
        depth = chosen // 2097152
        at = base + depth * count + rank
        tl.store(token_ids + first + made, tl.load(ids + at))
        tl.store(parents + first + made, parent)
        tl.store(depths + first + made, depth + 1)
        tl.store(scores + first + made, best.to(tl.float32))
        # The sibling takes the slot over.
        sibling = up + _gain(on, off, at + 1, rank + 1 < width, beside)
        line = tl.where(mine, sibling, line)
        entry = tl.where(mine, chosen + 1, entry)
        # The first child has a slot of its own.
        strays = tl.where((beside != 0) | (rank > 0), zero + 1, zero)
        below = base + (depth + 1) * count
        child = best + _gain(on, off, below, depth + 1 < positions, strays)
        new = slot == made
        line = tl.where(new, child, line)
        above = tl.where(new, best, above)
        entry = tl.where(new, _entry(depth + 1, strays, made), entry)
        best = tl.max(line, 0)
        made += 1
        go = ((best > float("-inf")) & (made < nodes)).to(tl.int64)

    node = tl.arange(0, BLOCK_N)
    root = node == 0
    edge = root | ((node >= made) & (node < nodes))
    tl.store(num_nodes + b, made)
    token = tl.where(root, tl.load(roots + b), -1)
    tl.store(token_ids + first + node, token, mask=edge)
    tl.store(parents + first + node, tl.full([BLOCK_N], -1, tl.int64), mask=edge)
    tl.store(depths + first + node, tl.zeros([BLOCK_N], tl.int64), mask=edge)
    tl.store(scores + first + node, tl.where(root, 0.0, float("-inf")), mask=edge)
    origin = tl.where(root | (node >= made), 0, source)
    tl.store(sources + first + node, origin.to(tl.int8), mask=node < nodes)
    tl.debug_barrier()  # parents that other threads stored are read now
    real = node < made
    for word in tl.static_range(WORDS):
        bits = tl.zeros([BLOCK_N], tl.int64)
        here = tl.where(real, node, -1).to(tl.int64)
        for _step in range(positions + 1):
            bit = tl.zeros([BLOCK_N], tl.int64) + 1
            bit = bit << (here & 63)
            bits = bits | tl.where((here >= 0) & (here // 64 == word), bit, 0)
            here = tl.load(parents + first + here, mask=here > 0, other=-1)
        tl.store(mask + (first + node) * WORDS + word, bits, mask=node < nodes)
